"""DebugUnderflowOverflow: the recorder. Detects cheaply at module outputs, explains by a replay."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mldebug.core.errors import UsageError
from mldebug.core.scope import Scope
from mldebug.numerics import _hub
from mldebug.numerics._event import Event, Role
from mldebug.numerics._frames import Frames
from mldebug.numerics._judge import Judge
from mldebug.numerics._memory import Memory
from mldebug.numerics._records import Call, Site, Watched
from mldebug.numerics._replay import NotReplayable, Snapshot, changing_buffers, check_model
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._respond import Responder
from mldebug.numerics._tensors import is_plain, leaves, parts, tracing_now
from mldebug.numerics._weights import Weights

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
        include, exclude: glob patterns of module names to measure or leave out.
        on_step: called with (step, {"loss": ..., "absmax": ..., "grad_norm": ...}) once per optimizer step.
        output: a file for JSON lines: one per step, then the frames and the event. Each line is flushed.

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
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        on_step: Callable[[int, dict[str, float]], None] | None = None,
        output: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_arguments(model, max_frames_to_save, check, on_event)
        self.max_frames_to_save = max_frames_to_save
        self.trace_batch_nums = frozenset(trace_batch_nums or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.check = check
        self.include, self.exclude = tuple(include), tuple(exclude)

        self.call: Call | None = None  # the root forward under way
        self.live: Frames | None = None  # takes frames from live tensors: replay, check="each", traced batches
        self.step = 0  # optimizer steps, skipped ones included
        self.batch_number = 0  # root forwards
        self.micro_batch = 0  # training forwards since the last optimizer step
        self.eval_batches = 0  # root forwards without gradients or in eval mode
        self.memory = Memory()
        self.weights = Weights(self.memory)
        self._unread: deque[Call] = deque()
        self.recomputed = 0  # module calls that activation checkpointing ran again in backward
        self._changing: set[int] | None = None  # ids of buffers seen to change in a forward
        self._step_is_given = False  # by diagnose(); else optimizer steps are counted
        self._step_counts: dict[int, int] = {}  # id(optimizer) -> its steps
        self._in_scaler: dict[int, int] = {}
        self._adopt_all = model is None
        self._roots: list[Any] = []
        self._broken = False
        self._judge = Judge(self)
        self._respond = Responder(self, on_event, on_step, output)
        model = getattr(model, "_orig_mod", model) if type(model).__name__ == "OptimizedModule" else model
        self._model = None if model is None else weakref.ref(model)
        if model is not None:
            weakref.finalize(model, self.remove).atexit = False
        self._attached = False
        self._attach()

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
        self._attached = False
        _hub.detach(self)
        self.call = self.live = None
        self._unread.clear()
        self.weights.release()
        self._respond.close()

    @property
    def report(self) -> NumericsReport:
        """What has been found up to now: the first event if there was one, frames, notes, history."""
        self.poll()
        return self._respond.report()

    def poll(self, wait: bool = True) -> Event | None:
        """Read the device's verdict on what has run; handle an event as `on_event` says. Returns the event if handled."""
        if self.call is not None and self.call.extra.get("implicit"):
            self._close(self.call)
        if not self._unread:
            return None
        seen = self.memory.flags(wait)
        if seen is None:
            return None
        alarm, near = seen
        calls, self._unread = list(self._unread), deque()
        try:
            if alarm is None and near is None:
                return None
            self.memory.clear_flags()
            if near is not None:
                self._respond.note_near(near)
            found = None if alarm is None else self._judge.explain(alarm, calls)
            return None if found is None else self._respond.handle(found, [call.snapshot for call in calls])
        except (NumericsError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._respond.handing_over:
                raise  # the user's own on_event
            self._fail(error)
            return None
        finally:
            for call in calls:
                call.snapshot = None

    def finish(self, exc: BaseException | None = None, at_exit: bool = False) -> None:
        """End of the scope or of the process: what is still pending is read and reported."""
        if self.call is not None:
            self._close(self.call)
        try:
            if exc is not None or at_exit:
                with self._respond.never_raise(exc):
                    self.poll()
            else:
                self.poll()
        finally:
            self._respond.finish()

    # Called by the hooks.

    def enter(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], get_kwargs: Callable[[], dict[str, Any]]
    ) -> None:
        """A watched module is about to run."""
        call = self.call
        if call is not None:
            if self.live is not None and not call.paused:
                self.live.enter(watched, args, get_kwargs())
                if self._judge.replaying or watched is not call.watched:
                    return
            if watched is call.watched and not _hub.running_now(module):
                self._close(call)  # it raised, and nobody told us
            else:
                call.depth += watched is call.watched
                return
        elif torch._C._current_graph_task_id() != -1:
            self.recomputed += 1  # activation checkpointing, inside backward: it was seen before
            return
        self._guard(self._open, watched, module, args, get_kwargs)
        if self.live is not None and self.call is not None and not self.call.paused:
            self.live.enter(watched, args, get_kwargs())

    def leave(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A watched module has run: measure what it returned. This is the hot path."""
        call = self.call
        if call is None:
            return
        if self._judge.replaying:
            self._leave_live(watched, module, args, kwargs, output)
            return
        if not call.paused and not watched.muted:
            if self.live is not None:
                self._leave_live(watched, module, args, kwargs, output)
            elif not watched.wrapper or self.memory.sequence == call.first:
                try:
                    if type(output) is Tensor and is_plain(output):
                        self.memory.record(watched.site("output", output.dtype, "output"), output)
                    elif output is not None:
                        self._record_leaves(watched, output, "output")
                except Exception as error:  # our failure is never the end of the run
                    self._fail(error)
        if watched is call.watched:
            if call.depth:
                call.depth -= 1
            else:
                call.finished = True
                self._close(call)
                self._after_call(call)

    def before_step(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """An optimizer, or a GradScaler holding one, is about to step."""
        if scaler is not None:
            self._in_scaler[id(optimizer)] = self._step_counts.get(id(optimizer), 0)
        self.poll(wait=self.check != "async")
        self._respond.drop_if_bad(optimizer, scaler)
        if self._owns(optimizer):
            self._guard(self.weights.read_gradients, self.step, optimizer, scaler)

    def after_step(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        """A step is over. `step` is the largest count of any optimizer: two optimizers of one model step together."""
        if not self._owns(optimizer):
            return
        key = id(optimizer)
        self.weights.due = True
        if scaler is not None:
            before = self._in_scaler.pop(key, 0)
            if self._step_counts.get(key, 0) != before:
                return  # not skipped: its own hook has counted it
        count = self._step_counts[key] = self._step_counts.get(key, 0) + 1
        self.micro_batch = 0
        if count > self.step and not self._step_is_given:
            self._respond.step_done(self.step)
            self.step = count

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.weights.owns(optimizer, alone=len(_hub.RECORDERS) == 1)

    def set_step(self, step: int) -> None:
        """Number the step from outside, as diagnose() does."""
        if self._step_is_given and step != self.step:
            self._respond.step_done(self.step)
        self._step_is_given = True
        self.step = step
        self.micro_batch = 0
        self.weights.due = True

    def new_frames(self, on_frame: Callable[[str], None] | None = None) -> Frames:
        return Frames(self.max_frames_to_save, on_frame, whole=not self.include and not self.exclude)

    def note(self, text: str) -> None:
        """Add a note to the report, once."""
        self._respond.notes[text] = None

    def ring_frames(self, call: Call) -> list[str]:
        """Frames of a call from what was recorded of it: outputs only."""
        return self._judge.ring_frames(call, call.end - 1)

    def quiet(self) -> None:
        """Print nothing by itself."""
        self._respond.printing = False

    def adopt(self, module: nn.Module) -> Watched | None:
        """A module met for the first time: one added to a root since, or (watching all roots) a new root."""
        if self.call is not None:
            root = self.call.watched.root()
            if root is not None:
                for name, child in root.named_modules():
                    if child is module:
                        return self._watch(child, name, root)
            return None
        if self._adopt_all and not isinstance(module, torch.fx.GraphModule):
            self._add_root(module)
            return _hub.find(self, module)
        return None

    def record_value(self, value: Any, name: str, role: Role = "loss") -> None:
        """Measure a tensor (or nest of tensors) made outside any module."""
        self._record_leaves(None, value, name, role)
        call = self.call
        if call is None:
            call = self._unread[-1] if self._unread else self._new_call(self._outside(), self.memory.sequence)
            if not self._unread:
                self._unread.append(call)
            call.end = self.memory.sequence
            self.memory.publish(call.first, call.end)

    def record_compiled(self, watched: Watched, path: str, role: Role, value: Tensor) -> None:
        """A tensor inside a compiled graph, at run time."""
        if not self._attached or self.live is not None:
            return
        try:
            if self.call is None:
                if torch._C._current_graph_task_id() != -1:
                    return  # recomputed in backward; seen before
                self._open(watched, watched.ref() or nn.Identity(), (), dict)
                assert self.call is not None
                self.call.extra["implicit"] = True
            for part in parts(value):
                self.memory.record(watched.site(path, value.dtype, role), part)
        except NumericsError:
            raise
        except Exception as error:
            self._fail(error)

    def mark_compiled(self, watched: Watched, enter: bool) -> None:
        """A root that is compiled whole begins or ends."""
        if not self._attached:
            return
        call = self.call
        module = watched.ref()
        if enter and module is not None and call is None:
            self._guard(self._open, watched, module, (), dict)
            if self.call is not None:
                self.call.replay_reason = "the model is compiled as a whole, its arguments were not kept"
        elif not enter and call is not None and call.watched is watched and not call.wrapped:
            call.finished = True
            self._close(call)
            self._after_call(call)

    # One call.

    def _open(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], get_kwargs: Callable[[], dict[str, Any]]
    ) -> None:
        if self._unread:
            self.poll(wait=self.check != "async")
        call = self._new_call(watched, self.memory.sequence)
        call.wrapped = watched.wrapper
        call.paused = tracing_now()
        self.call = call
        if call.paused:
            return
        kwargs = get_kwargs()
        root = watched.root() or module
        bad_weights = False
        self.weights.refresh()
        if self.weights.due:
            call.params_first, call.first = self.weights.measure()
            if self.weights.passes == 1 or self.check == "each":
                bad_weights = self.weights.first_look(call.params_first, call.first)
        self._record_leaves(watched, args, "input", "input")
        for key, value in kwargs.items():
            if value is not None:
                self._record_leaves(watched, value, f"input.{key}", "input")
        if self.check != "each" or bad_weights:
            self._take_snapshot(call, root if watched.wrapper else module, args, kwargs)
        if bad_weights:
            self._close(call)
            self.poll()
            self.call = call
        if self.batch_number in self.trace_batch_nums:
            self.live = self.new_frames(print)
            self.live.begin_batch(self.batch_number)
        elif self.check == "each":
            self.live = self.new_frames()
            self.live.begin_batch(self.batch_number)

    def _new_call(self, watched: Watched, first: int) -> Call:
        module = watched.ref()
        return Call(
            watched,
            step=self.step,
            batch=self.batch_number,
            micro_batch=self.micro_batch,
            training=module.training if module is not None else True,
            grad=torch.is_grad_enabled(),
            first=first,
            thread=threading.get_ident(),
        )

    def _take_snapshot(
        self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            parameters = self.weights.parameters()
            if reason := check_model(parameters):
                raise NotReplayable(reason)
            changing = changing_buffers(self.weights.modules(), self._changing)
            call.snapshot = Snapshot(module, args, kwargs, parameters, self.weights.buffers(), changing)
            call.extra["buffers"] = self.weights.buffer_versions()
        except NotReplayable as reason:
            call.replay_reason = str(reason)
        except Exception as error:
            call.replay_reason = f"its inputs could not be kept ({type(error).__name__}: {error})"

    def _close(self, call: Call) -> None:
        """The end of a call, however it ended: hand over what it recorded."""
        self.call = None
        live, self.live = self.live, None
        if live is not None:
            self._respond.keep_frames(list(live.texts))
        call.end = self.memory.sequence
        self.memory.forget_last()
        if call.paused:
            return
        if call.snapshot is not None:
            before, now = call.extra.pop("buffers", {}), self.weights.buffer_versions()
            self._changing = (self._changing or set()) | {key for key, version in now.items() if before.get(key, version) != version}
        if call.end > call.start:
            self._unread.append(call)
            self._guard(self.memory.publish, call.start, call.end)
        self.memory.calls.append(call)

    def _after_call(self, call: Call) -> None:
        """What follows a root forward that ended well."""
        if call.paused or call.watched.name and not self._is_root(call.watched):
            return
        if call.training and call.grad:
            self.micro_batch += 1
        else:
            self.eval_batches += 1
        self.batch_number += 1
        if not call.grad:
            self.poll(wait=self.check != "async")
        last = self.abort_after_batch_num
        if last is not None and self.batch_number > last:
            self._respond.abort(self.batch_number, last)

    def _leave_live(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        live = self.live
        assert live is not None and self.call is not None
        try:
            live.leave(watched, module, args, kwargs, output)
        except Exception as error:
            self._fail(error)
        if live.finding is not None and not live.done:
            if self._judge.replaying:
                self._judge.stop_replay()
            elif self.batch_number not in self.trace_batch_nums:
                live.done = True
                self._respond.handle(self._judge.from_live(live, self.call), [])

    # Helpers.

    def _record_leaves(self, watched: Watched | None, value: Any, path: str, role: Role = "output") -> None:
        for name, leaf in leaves(value, path):
            if isinstance(leaf, Tensor):
                kind: Role = "loss" if name == "output.loss" else role
                for part in parts(leaf):
                    self.memory.record(self._site(watched, name, leaf.dtype, kind), part)

    def _site(self, watched: Watched | None, name: str, dtype: torch.dtype, role: Role) -> Site:
        return Site(None, name, dtype, role) if watched is None else watched.site(name, dtype, role)

    def _outside(self) -> Watched:
        root = self._roots[0]() if self._roots else None
        module = root if root is not None else nn.Identity()
        return _hub.find(self, module) or Watched(self, module, "", module)

    def _is_root(self, watched: Watched) -> bool:
        module = watched.ref()
        return any(ref() is module for ref in self._roots)

    def _attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        _hub.attach(self)
        model = self._model() if self._model is not None else None
        if model is not None:
            self._add_root(model)

    def _add_root(self, module: nn.Module) -> None:
        self._roots.append(weakref.ref(module))
        weakref.finalize(module, self.weights.release).atexit = False
        for name, child in module.named_modules():
            self._watch(child, name, module)

    def _watch(self, module: nn.Module, name: str, root: nn.Module) -> Watched:
        watched = _hub.watch(self, module, name, root)
        watched.muted = (bool(self.include) and not _matches(name, self.include)) or _matches(name, self.exclude)
        self.weights.add(watched, module)
        return watched

    def _guard(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            function(*args)
        except NumericsError:
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Our own failure is a warning, said once, and not the end of the run."""
        if not self._broken:
            self._broken = True
            warnings.warn(
                f"mldebug: the recorder could not measure a tensor ({type(error).__name__}: {error}); it goes on\n"
                "hint: some values may be missing from its report; please report this",
                stacklevel=3,
            )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_arguments(model: Any, max_frames: int, check: str, on_event: Any) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(
            f"DebugUnderflowOverflow needs a torch.nn.Module, got {type(model).__name__}",
            hint="pass the model itself: DebugUnderflowOverflow(model)",
        )
    if max_frames < 1:
        raise UsageError(f"max_frames_to_save is {max_frames}, it must be at least 1", hint="the default is 21")
    if check not in ("step", "async", "each"):
        raise UsageError(f"check is {check!r}", hint='use "step", "async" or "each"')
    if not callable(on_event) and on_event not in ("raise", "warn", "skip"):
        raise UsageError(f"on_event is {on_event!r}", hint='use "raise", "warn", "skip" or a function of the Event')
