"""How many steps each optimizer has made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mldebug.numerics._recorder import DebugUnderflowOverflow


class StepCounts:
    """The optimizers of one recorder. Those of one model step together, or take turns."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._counts: dict[int, int] = {}  # id(optimizer) -> its steps
        self._in_scaler: dict[int, int] = {}

    def enter_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler that holds it is about to step."""
        self._in_scaler[id(optimizer)] = self._counts.get(id(optimizer), 0)

    def inside_scaler(self, optimizer: torch.optim.Optimizer) -> bool:
        return id(optimizer) in self._in_scaler

    def counted(self, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
        """Whether the step that a GradScaler is done with was not skipped: the optimizer's own hook has counted it."""
        key = id(optimizer)
        return scaler is not None and self._counts.get(key, 0) != self._in_scaler.pop(key, 0)

    def add(self, optimizer: torch.optim.Optimizer) -> int:
        """Its steps, with the one just made."""
        key, step = id(optimizer), self._recorder.step
        if key not in self._counts:
            # One made later takes part from here on: in the step just made if no forward was run since, else in a new.
            # After the very first step it is the other one of two that take turns, each with a forward of its own.
            first = step == 1 and bool(self._counts)
            new = self._recorder.forwards.micro_batch > 0 and not first
            self._counts[key] = step if new else max(step - 1, 0)
            self._recorder.when_dead(optimizer, self._counts.pop, key, None)
        self._counts[key] += 1
        return self._counts[key]
