"""How many steps each optimizer has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics._respond import Responder
    from mldebug.numerics.gradients._stepping import Stepping


class StepCounts:
    """The optimizers of one recorder. Those of one model step together, or take turns."""

    def __init__(self, recorder: DebugUnderflowOverflow, stepping: Stepping, respond: Responder) -> None:
        self._recorder, self._stepping, self._respond = recorder, stepping, respond
        self._given = False  # by diagnose(); else optimizer steps are counted
        self._counts: dict[int, int] = {}  # id(optimizer) -> its steps
        self._in_scaler: dict[int, int] = {}
        self._together: set[int] = set()  # ids of the optimizers that have stepped since the last training forward
        self._step = 0  # which step these made

    def enter_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler that holds it is about to step."""
        self._in_scaler[id(optimizer)] = self._counts.get(id(optimizer), 0)

    def inside_scaler(self, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
        """Whether this is the step that a GradScaler makes, which was looked at before."""
        return scaler is None and id(optimizer) in self._in_scaler

    def current(self, optimizer: torch.optim.Optimizer) -> int:
        """Which step this optimizer is about to make: that of the others that have stepped since the last forward."""
        others = self._together - {id(optimizer)}
        alone = self._recorder.forwards.trained or id(optimizer) in self._together or not others
        return self._recorder.step if alone else self._step

    def over(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """A step of an optimizer, or of a GradScaler holding one, is over."""
        recorder = self._recorder
        if not recorder.owns(optimizer):
            return
        if recorder.graphs.capturing:
            recorder.graphs.saw_step(optimizer)
        elif self._counted(optimizer, scaler):
            recorder.weights.due = True
        else:
            self.count(optimizer, look=True)

    def count(self, optimizer: torch.optim.Optimizer, look: bool = False) -> None:
        """It has stepped, and is looked at if that is wanted. The recorder's `step` is the largest count of any
        optimizer: two optimizers of one model step together."""
        recorder = self._recorder
        recorder.weights.due = True
        step = self._step = self.current(optimizer)
        if recorder.forwards.trained:
            self._together.clear()
        self._together.add(id(optimizer))
        count = self._add(optimizer)
        recorder.values.step_over()
        recorder.tell_unmatched()
        if look:
            recorder.guard(self._stepping.after, optimizer, step)
        if count > recorder.step and not self._given:
            self._respond.step_done(recorder.step)
            recorder.step = count

    def set(self, step: int) -> None:
        """Number the step from outside, as diagnose() does."""
        recorder = self._recorder
        if self._given and step != recorder.step:
            self._respond.step_done(recorder.step)
        self._given = True
        self._together.clear()
        recorder.step = step
        recorder.values.step_over()
        recorder.weights.due = True

    def _counted(self, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
        """Whether the step that a GradScaler is done with was not skipped: the optimizer's own hook has counted it."""
        key = id(optimizer)
        return scaler is not None and self._counts.get(key, 0) != self._in_scaler.pop(key, 0)

    def _add(self, optimizer: torch.optim.Optimizer) -> int:
        """Its steps, with the one just made."""
        key, step = id(optimizer), self._recorder.step
        if key not in self._counts:
            # One made later takes part from here on: in the step just made if no forward was run since, else in a new.
            # After the very first step it is the other one of two that take turns, each with a forward of its own.
            first = step == 1 and bool(self._counts)
            new = self._recorder.forwards.micro_batch > 0 and not first
            self._counts[key] = step if new else max(step - 1, 0)
            self._recorder.when_dead(optimizer, self._forget, key)
        self._counts[key] += 1
        return self._counts[key]

    def _forget(self, key: int) -> None:
        self._counts.pop(key, None)
        self._together.discard(key)
