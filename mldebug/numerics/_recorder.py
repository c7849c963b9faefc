"""DebugUnderflowOverflow: the recorder. Detects cheaply at module outputs, explains by a replay."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from mldebug.core.errors import UsageError
from mldebug.core.scope import Scope
from mldebug.numerics import _hub
from mldebug.numerics._arguments import batches, check_arguments
from mldebug.numerics._cuda_graphs import CudaGraphs
from mldebug.numerics._elsewhere import Elsewhere
from mldebug.numerics._event import Event
from mldebug.numerics._filter import Filter
from mldebug.numerics._forwards import Forwards
from mldebug.numerics._frames import Frames
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._respond import Responder
from mldebug.numerics._roots import Roots
from mldebug.numerics._step_counts import StepCounts
from mldebug.numerics._tell import warn
from mldebug.numerics._values import Values
from mldebug.numerics._weights import Weights
from mldebug.numerics.bundle._bundle_inputs import HeldInputs
from mldebug.numerics.distributed import _together
from mldebug.numerics.distributed._ranks import Ranks
from mldebug.numerics.gradients._gradients import Gradients
from mldebug.numerics.gradients._output_gradients import OutputGradients
from mldebug.numerics.gradients._stepping import Stepping
from mldebug.numerics.replay._found import Found
from mldebug.numerics.replay._judge import Judge
from mldebug.numerics.ring._memory import Memory
from mldebug.numerics.ring._records import Call

if TYPE_CHECKING:
    from mldebug.numerics.ops._ops import OpWatch

CheckMode = Literal["step", "async", "each"]
OnEvent = Literal["raise", "warn", "skip"] | Callable[[Event], None]


class DebugUnderflowOverflow(Scope):
    """Find where NaN, inf or overflow began in a training run, at a price low enough to leave on.

    Attaches when constructed and keeps itself alive; `with` and the decorator form add removal at the end. Takes the
    arguments of the transformers class of the same name with the same meaning.

    Args:
        model: the root module. Modules added later are seen too. A compiled model may be given as it is.
        max_frames_to_save: how many frames (module calls) before the event are reported.
        trace_batch_nums: batches (root forwards, from 0) whose frames are printed as they run, without detection.
        abort_after_batch_num: stop with a NumericsError after this batch.
        check: "step" waits for the verdict before the optimizer may use it; "async" reads it one step late and never
            waits; "each" stops at the very module (slow: several device reads a tensor).
        on_event: "raise" a NumericsError; "warn" and go on; "skip" the optimizer step of the bad batch and go on; or
            call a function with the Event.
        include, exclude: glob patterns of module names to measure or leave out. One that matches no module is a
            NumericsWarning; patterns that leave nothing are a UsageError.
        on_step: called with (step, {"loss": ..., "absmax": ..., "grad_norm": ...}) once per optimizer step.
        output: a file for JSON lines: one per step, then the frames and the event. Each line is flushed.
        dump_dir: a folder for the faulty steps: inputs, random states, the operation of the event with its operands,
            and a repro.py that runs it; the first 8 events of a rank.
        backward: measure the gradients of module outputs too, by hooks on these tensors: where a bad gradient first
            shows on a device whose backward is not run again, and maps of gradients beside those of outputs.

    Raises:
        NumericsError: a ValueError, when an event was found and `on_event` is "raise". `.report` holds everything.

    Example:
        DebugUnderflowOverflow(model)
        for batch in loader: ...
    """

    def __init__(
        self,
        model: nn.Module | None,
        max_frames_to_save: int = 21,
        trace_batch_nums: Iterable[int] | None = (),
        abort_after_batch_num: int | None = None,
        *,
        check: CheckMode = "step",
        on_event: OnEvent = "raise",
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        output: str | os.PathLike[str] | None = None,
        dump_dir: str | os.PathLike[str] | None = None,
        backward: bool = False,
    ) -> None:
        check_arguments(model, max_frames_to_save, check, on_event, on_step, abort_after_batch_num)
        self.max_frames_to_save = max_frames_to_save
        self.trace_batch_nums = batches(trace_batch_nums)
        self.abort_after_batch_num = abort_after_batch_num
        self.check = check
        self.dump_dir = None if dump_dir is None else os.path.abspath(dump_dir)  # the script may change the folder
        self.inputs = None if dump_dir is None else HeldInputs()
        self.filter = Filter(include, exclude)

        self.step = 0  # optimizer steps, skipped ones included
        self.memory = Memory()
        self.weights = Weights(self.memory)
        self.gradients = Gradients(self.weights)
        self.output_gradients = OutputGradients(self) if backward else None
        self.forwards = Forwards(self)
        self.graphs = CudaGraphs(self)
        self.values = Values(self)
        self.ops: OpWatch | None = None  # looks at every operation, for diagnose()
        self.roots = Roots(self, adopt_all=model is None)
        self._broken = False
        self.pending: tuple[Found, list[Callable[[], None]]] | None = None  # explained, not responded to yet
        self._judge = Judge(self)
        self._respond = Responder(self, on_event, on_step, output)
        self.ranks = Ranks(self, self._judge, self._respond)
        self._stepping = Stepping(self, self._judge, self._respond)
        self.steps = StepCounts(self, self._stepping, self._respond)
        model = getattr(model, "_orig_mod", model) if type(model).__name__ == "OptimizedModule" else model
        self._model = None if model is None else weakref.ref(model)
        self._finalizers: list[weakref.finalize[..., Any]] = []
        self.attached = False
        self._attach()

    @property
    def batch_number(self) -> int:
        """Root forwards up to now, as the classic class counts batches."""
        return self.forwards.batches

    # The scope.

    def start(self) -> None:
        """Attach again after `remove()`; nothing to do right after construction."""
        self._attach()

    def stop(self, exc: BaseException | None) -> None:
        """Leave the scope: read what is pending, report it, take every hook away."""
        try:
            self.finish(exc=exc)
        finally:
            self.remove()

    def remove(self) -> None:
        """Take the recorder off: no hook, patch or filter of it is left. Safe to call twice."""
        if not self.attached:
            return
        self.attached = False
        _together.leave(self)
        _hub.detach(self)
        while self._finalizers:
            self._finalizers.pop().detach()
        with self._respond.never_raise(None):
            self.settle()  # what is still pending is in the report
        self.forwards.live = None
        self.forwards.backwards.clear()
        self.graphs.clear()
        if self.output_gradients is not None:
            self.output_gradients.clear()
        if self.inputs is not None:
            self.inputs.clear()
        self._respond.close()
        self.weights.release()

    @property
    def report(self) -> NumericsReport:
        """What has been found up to now: the first event if there was one, frames, notes, history."""
        self.poll()
        return self._respond.report()

    def poll(self, wait: bool = True) -> Event | None:
        """Read the device's verdict on what has run; handle an event as `on_event` says. The event that was handled."""
        if self._respond.busy or self.graphs.capturing:
            return None  # the user's on_event runs the model; or there is nothing to read yet
        self.forwards.close_stale()
        self.examine(wait)
        self.graphs.count_steps()
        found, self.pending = self.pending, None
        return None if found is None else self._respond.handle(*found)

    def examine(self, wait: bool = True) -> None:
        """Read the verdict and explain an alarm, while weights and buffers are those of the forward; respond later."""
        forwards = self.forwards
        seen = self.memory.flags(wait) if forwards.unread else None
        if seen is None:
            return
        alarm, near = seen
        calls, forwards.unread = list(forwards.unread), deque()
        try:
            if alarm is not None or near is not None:
                if near is not None and (alarm is None or near < alarm):
                    self._respond.notes.near(near)
                found = None if alarm is None else self._judge.explain(calls)
                if found is not None:  # with weights that were bad before it the forward is bad, too
                    forwards.bad_batch = found.event.batch
                if found is not None and self.pending is None:
                    restore = [call.snapshot.restore_buffers for call in calls if call.snapshot is not None]
                    self.pending = found, restore
                    self._respond.announce(found, waits=calls[-1].grad)
        except Exception as error:
            self.fail(error)
        except BaseException:  # Ctrl-C in a replay: what the ring says is still there
            self.pending = self.pending or self._judge.without_replay(calls)
            raise
        finally:
            if alarm is not None or near is not None:
                self.memory.clear_flags()
            for call in calls:
                call.snapshot = None

    def finish(self, exc: BaseException | None = None, at_exit: bool = False) -> None:
        """End of the scope or of the process: what is still pending is read and reported."""
        self.tell_unmatched()
        if self.memory.on_host or not (exc or at_exit):  # else a device may never answer
            self.guard(self.values.look_at_weights)
        try:
            if exc is not None or at_exit:
                with self._respond.never_raise(exc):
                    self.settle()
            else:
                self.settle()
        finally:
            self._respond.finish()

    # Steps.

    def before_step(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """An optimizer, or a GradScaler holding one, is about to step."""
        if self.graphs.capturing:
            return
        if scaler is not None:
            self.steps.enter_scaler(optimizer)
        if self.owns(optimizer):
            self.guard(self.ranks.replay_with_all)
        self.poll(wait=self.check != "async")
        self.ranks.heed(stepping=True)
        if self.ops is not None:
            self.judge_operations(scaler)
        step = self.steps.current(optimizer)
        dropped = self._respond.drop_if_bad(optimizer, scaler, self.owns(optimizer), step)
        if self.owns(optimizer):
            self.guard(self._look_at_gradients, optimizer, scaler, step, dropped)
            self.forwards.backwards.clear()

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer, scaler: Any, step: int, dropped: bool) -> None:
        new = self._stepping.before(optimizer, scaler, step)
        if not new or dropped or self.ops is not None or not self.memory.on_host:  # a device is not waited for
            return
        found = self._judge.before_step(step, scaler, self.forwards.backwards)
        if found is not None:
            self._respond.handle(found)
        else:
            self.ranks.listen()
        self._stepping.look_for_underflow(step)

    def judge_dropped(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The gradients of this step are about to be taken away, as they are not finite: that is an event."""
        self.gradients.take(step, self.batch_number, optimizer)
        found = self._judge.dropped(step, self.forwards.backwards)
        if found is not None:
            self._respond.handle(found)

    def judge_gradients(self) -> Event | None:
        """For diagnose(), which may wait: the event in the gradients of this step, if there is one."""
        self.guard(self.gradients.take, self.step, self.batch_number)
        norms = self.gradients.of(self.step)
        found = None if norms is None else self._judge.from_gradients(norms)
        return None if found is None else self._respond.handle(found)

    def judge_operations(self, scaler: Any = None, over: bool = False) -> Event | None:
        """For diagnose(): the event in the operations of this step, before an optimizer steps or when it is `over`."""
        origin = None if self.ops is None else self.ops.verdict(scaler, over)
        found = None if origin is None else self._judge.from_origin(origin)
        return None if found is None else self._respond.handle(found)

    def settle(self) -> Event | None:
        """After an exception: close what it left open and read the verdict."""
        if self.forwards.call is not None:
            self.forwards.close(self.forwards.call)
        return self.poll()

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.weights.owns(optimizer, alone=len(_hub.RECORDERS) == 1)

    # For the other parts of the recorder.

    @property
    def model(self) -> nn.Module | None:
        """The root that it was given, while that lives."""
        return None if self._model is None else self._model()

    @property
    def elsewhere(self) -> Elsewhere:
        """What it knows of the other recorders, and they of it."""
        return self._respond.elsewhere

    def refine(self, found: Found) -> Found:
        """An event with what is known of the operation behind it."""
        return found if self.ops is None else self._judge.refine(found, self.ops)

    def scaling_note(self) -> str:
        """What GradScaler skipped; "" if nothing."""
        return self._judge.scaling.said(self.step)

    def note(self, text: str) -> None:
        """Add a note to the report, once."""
        self._respond.notes.add(text)

    def remark(self, text: str) -> None:
        """Add a note, and warn of it the first time."""
        self._respond.notes.remark(text)

    def quiet(self, warnings: bool = True, last_word: Callable[[NumericsReport], object] | None = None) -> None:
        """Print no reports by itself, and with `warnings` give none.

        `last_word` shows the report of a rank that has to be ended, in another thread.
        """
        self._respond.printing = False
        self._respond.notes.warning = not warnings
        self._respond.last_word = last_word

    def batch_begins(self) -> None:
        self._respond.batch_begins()

    def keep_frames(self, frames: list[str]) -> None:
        self._respond.keep_frames(frames)

    def ring_frames(self, call: Call) -> list[str]:
        """Frames of a call from what was recorded of it: outputs only."""
        return self._judge.ring_frames(call, call.end - 1)

    def found_live(self, live: Frames, call: Call) -> None:
        """Live frames have met a bad tensor."""
        if self.forwards.replaying:
            self._judge.reruns.stop()
        elif call.batch not in self.trace_batch_nums:
            self.forwards.bad_batch = call.batch
            self._respond.handle(self._judge.from_live(live, call))

    def abort_if_last(self) -> None:
        last = self.abort_after_batch_num
        if last is not None and self.batch_number > last:
            self._respond.abort(self.batch_number, last)

    def when_dead(self, thing: object, function: Callable[..., Any], *args: Any) -> None:
        """Call a function when a module or optimizer dies, as long as the recorder is attached."""
        finalizer = weakref.finalize(thing, function, *args)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def guard(self, function: Callable[..., Any], *args: Any) -> None:
        """Call one of our own functions: its failure is a warning."""
        try:
            function(*args)
        except NumericsError:
            raise
        except Exception as error:
            if error is self._respond.user_error:
                raise
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Our own failure is a warning, said once, and not the end of the run."""
        if not self._broken:
            self._broken = True
            what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            warn(
                f"mldebug: the recorder could not measure a tensor ({what}); it goes on\n"
                "hint: some values may be missing from its report; please report this"
            )

    def _attach(self) -> None:
        if self.attached:
            return
        self.attached = True
        try:
            self._respond.begin()
            self.filter.begin()
            _hub.attach(self)
            if (model := self.model) is not None:
                self.when_dead(model, self.remove)
                self.roots.add(model)
                if self.filter.nothing_left:
                    raise UsageError(f"nothing would be watched: {self.filter.nothing_left}", self.filter.hint())
                self.tell_unmatched()
        except BaseException:  # nobody has this recorder yet, to remove it
            self.remove()
            raise

    def tell_unmatched(self) -> None:
        """Warn of patterns that match no module, once: now, or where models come later when the first step is over."""
        if self.filter.told or not self.filter.modules:
            return
        self.filter.told = True
        if text := self.filter.nothing_left or self.filter.unmatched():
            warn(f"mldebug: {text}\nhint: {self.filter.hint()}")
