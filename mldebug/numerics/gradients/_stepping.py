"""What a recorder looks at around the step of an optimizer: gradients, what underflows, what the optimizer keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics.gradients._optimizer_states import OptimizerStates
from mldebug.numerics.gradients._rounding import Rounding
from mldebug.numerics.gradients._underflow import Underflow
from mldebug.numerics.replay._found import Found
from mldebug.numerics.replay._judge import Judge

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics._respond import Responder


class Stepping:
    """The looks of one recorder; nothing here waits for a device."""

    def __init__(self, recorder: DebugUnderflowOverflow, judge: Judge, respond: Responder) -> None:
        self._recorder, self._judge, self._respond = recorder, judge, respond
        self._states = OptimizerStates(recorder)
        self._underflow = Underflow(recorder.weights)
        self._rounding = Rounding(recorder.weights)

    def before(self, optimizer: torch.optim.Optimizer, scaler: Any, step: int) -> bool:
        """Take the norms of the gradients; whether they are others than another optimizer of this step has met. Those
        of the step before have long arrived: what they show is told."""
        recorder = self._recorder
        self._judge.updates.before(optimizer, step)
        if recorder.output_gradients is not None:
            recorder.output_gradients.end_step(step)
        before = recorder.gradients.of(step - 1)
        self._respond.left_out.applied(before)
        if before is not None and (zero := before.underflow()) is not None:
            self._respond.notes.underflow(*zero)
        if before is not None and before.scaled and not recorder.memory.on_host and recorder.ops is None:
            found = self._judge.scaling.judge(before, [])
            if found is not None:
                self._respond.handle(found)
        new = recorder.gradients.take(step, recorder.batch_number, optimizer, scaler)
        if scaler is None and recorder.ops is None:
            self._rounding.before(optimizer, step)
        return new

    def look_for_underflow(self, step: int) -> None:
        """On a host, where forwards and their backwards can be run again."""
        recorder = self._recorder
        note = self._underflow.look(self._judge, recorder.forwards.backwards.ran(), step)
        if not note:
            return
        warned = self._respond.notes.has("underflow: the gradient of")
        (recorder.note if warned else recorder.remark)(note)

    def after(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Look at what the optimizer keeps of each parameter, and at what became of them."""
        if note := self._rounding.after(step):
            self._recorder.remark(note)
        event = self._states.after_step(optimizer, step)
        # Of a gradient that was bad before it is the mark, and the next forward tells what came of the replay.
        if event is not None and not self._judge.has_unshown(event.step):
            self._respond.handle(Found(replace(event, cause=self._judge.updates.of_state(event)), [], ""))
