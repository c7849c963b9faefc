"""What is measured outside of the forwards: losses, values that check() is given, weights after the last step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mldebug.numerics import _hub
from mldebug.numerics._event import Role
from mldebug.numerics._losses import single_values, trains_others
from mldebug.numerics.ring._records import is_compiled

if TYPE_CHECKING:
    from torch import Tensor

    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ops._loss_graph import LossOperation
    from mldebug.numerics.replay._backward import Kept


class Values:
    """These looks of one recorder. No device is waited for."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._memory, self._forwards = recorder.memory, recorder.forwards
        self._scaled = False  # a GradScaler has scaled the loss of this step
        self._found: tuple[int, LossOperation] | None = None  # by batch

    def record(self, value: Any, name: str, role: Role) -> None:
        """Measure a tensor, or a nest of tensors, made outside any module."""
        memory, forwards = self._memory, self._forwards
        first = memory.sequence
        forwards.record(None, value, name, role)
        if forwards.call is not None or memory.sequence == first or self._recorder.graphs.capturing:
            return
        last = memory.calls[-1] if memory.calls else None
        joins = last is not None and last.end == first  # what is remembered of a forward goes on with it
        if not forwards.unread:
            outside = forwards.new_call(self._recorder.roots.outside(), first)
            # It belongs to the forward that has just run.
            outside.batch, outside.micro_batch = max(outside.batch - 1, 0), max(outside.micro_batch - 1, 0)
            outside.finished = True
            forwards.unread.append(outside)
            if not joins:
                memory.calls.append(outside)
        if joins and last is not None:
            last.end = memory.sequence
        call = forwards.unread[-1]
        call.end = memory.sequence
        memory.publish(first if joins else call.first, call.end)

    def record_loss(self, value: Any, scaled: bool) -> None:
        """Measure what a backward is about to start from, or what a GradScaler is about to scale.

        A loss that was scaled may be inf and be no trouble: only what it was before counts. So does only a loss that
        was made of a forward seen here, in which nothing was bad: it is not asked for where modules are left out.
        """
        recorder, forwards = self._recorder, self._forwards
        self._scaled = self._scaled or scaled
        if recorder.output_gradients is not None and not scaled:
            recorder.output_gradients.backward_begins()
        if recorder.graphs.capturing:
            if losses := single_values(value):
                self.record(losses[0] if len(losses) == 1 else losses, "loss", "loss")
            return
        other = _hub.replaying is not None or not forwards.trained or (self._scaled and not scaled)
        if forwards.call is not None or other:
            return
        losses = single_values(value)
        if recorder.ops is not None:
            recorder.ops.returned(losses)
            return
        batch, watched = max(forwards.batches - 1, 0), recorder.filter  # 0 where parts of the model are called alone
        if forwards.bad_batch == batch or watched.measured < watched.modules:
            return
        for loss in losses:
            if loss.is_cpu and not math.isfinite(abs(loss.item())):  # it may be complex
                if trains_others(loss, recorder.weights.parameters()):
                    return
                kept = forwards.backwards.of_batch(batch) if forwards.batches else forwards.backwards.last()
                if kept is not None and is_compiled(kept.call) and not kept.returned_fine():
                    return  # it may be what compiled code returned, if not what its modules did: gradients lead to that
                if kept is not None:
                    recorder.guard(self._look_into, loss, kept)
        if losses:
            self.record(losses[0] if len(losses) == 1 else losses, "loss", "loss")
        fine = all(loss.is_cpu and math.isfinite(abs(loss.item())) for loss in losses)  # else its gradients follow
        if losses and fine and (nodes := forwards.backwards.nodes()):
            recorder.guard(forwards.backwards.after_model.watch, losses, nodes)

    def operation_of(self, batch: int) -> LossOperation | None:
        """The operation behind the bad loss of a batch, where its graph has told."""
        return self._found[1] if self._found is not None and self._found[0] == batch else None

    def _look_into(self, loss: Tensor, kept: Kept) -> None:
        from mldebug.numerics.ops._loss_graph import operation_of_loss

        found = operation_of_loss(loss, kept.last, self._recorder.dump_dir is not None)
        if not self._recorder.forwards.batches:
            self._found = None  # of an earlier step: its number is the same
        if found is not None and self.operation_of(kept.call.batch) is None:
            self._found = kept.call.batch, found

    def look_at_weights(self) -> None:
        """Measure what the last optimizer step has made of the weights, where no forward has come after it."""
        forwards, memory, weights = self._forwards, self._memory, self._recorder.weights
        weights.refresh()
        # A step by hand, on p.data, leaves no trace.
        if forwards.call is not None or not (weights.due or forwards.trained) or not weights.passes:
            return
        call = forwards.new_call(self._recorder.roots.outside(), memory.sequence)
        call.same_step = weights.last_step == call.step
        call.params_first, call.first = weights.measure(call.step)
        call.end, call.new_names, call.finished = call.first, weights.new_names, True
        call.replay_reason = "no forward came after it"
        call.batch = max(call.batch - 1, 0)
        forwards.unread.append(call)
        memory.publish(call.start, call.end)

    def step_over(self) -> None:
        """An optimizer has stepped."""
        self._forwards.micro_batch = 0
        self._forwards.trained = self._scaled = False
        if not self._forwards.batches:
            self._forwards.bad_batch = -1
