"""Follows the forwards of the watched modules: opens a call at the root, measures every output, closes the call."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mldebug.numerics import _hub
from mldebug.numerics._event import Role
from mldebug.numerics._frames import Frames
from mldebug.numerics._tell import say
from mldebug.numerics._tensors import is_plain, leaves, parts, tracing_now
from mldebug.numerics.compiled import _compiled
from mldebug.numerics.replay._backward import Backwards
from mldebug.numerics.replay._collectives import NotReplayable
from mldebug.numerics.replay._replay import Snapshot, changing_buffers, check_model
from mldebug.numerics.ring._records import Call, RowsOf, Site, Watched

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_CACHES = ("past_key_values", "past_key_value", "cache_params")  # keyword inputs of a model that generates


class Forwards:
    """The forwards of one recorder. Its methods are called by the hooks; `leave` is the hot path."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._memory = recorder.memory
        self._weights = recorder.weights
        self._gradients = recorder.output_gradients
        self.call: Call | None = None  # the root forward under way
        self.live: Frames | None = None  # takes frames from live tensors: replay, check="each", traced batches
        self.replaying = False  # what runs is a replay: frames are taken, nothing else
        self.backwards = Backwards(recorder)
        self.unread: deque[Call] = deque()  # calls whose verdict was not read yet
        self.batches = 0  # root forwards, of all kinds
        self.micro_batch = 0  # training forwards since the last optimizer step
        self.eval_batches = 0  # without gradients or in eval mode
        self.generated = 0  # of those, the ones that continued a generation: tokens
        self.recomputed = 0  # module calls that activation checkpointing ran again in backward
        self.bad_batch = -1  # the last batch whose forward had an event
        self.trained = False  # a forward with gradients has run since the last optimizer step
        self._changing: set[int] | None = None  # ids of buffers seen to change in a forward
        self._checked = -1  # which list of the parameters check_model() has seen
        self._sharded = ""  # what it said
        self._compiled_again: Callable[[], None] | None = None  # ends what `live` began: compiled code runs as written
        self._copy_inputs = False  # a forward was seen to change its inputs in place

    def wants_frames(self) -> bool:
        """Whether frames are taken from the live tensors of the next root forward."""
        return self._recorder.check == "each" or self.batches in self._recorder.trace_batch_nums

    # Called by the hooks.

    def enter(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], get_kwargs: Callable[[], dict[str, Any]]
    ) -> None:
        """A watched module is about to run."""
        call = self.call
        if call is not None:
            if call.thread != threading.get_ident():
                return
            if self.live is not None and not call.paused:
                self.live.enter(watched, args, get_kwargs())
                if self.replaying or watched is not call.watched:
                    return
            if watched is not call.watched:
                return
            if _hub.running_now(module):
                call.depth += 1  # it calls itself
                return
            self.close(call)  # it raised, and nobody told us
        elif torch._C._current_graph_task_id() != -1:
            self.recomputed += 1  # activation checkpointing, inside backward: it was seen before
            return
        self._recorder.guard(self._open, watched, module, args, get_kwargs)
        if self.live is not None and self.call is not None and not self.call.paused:
            self.live.enter(watched, args, get_kwargs())

    def leave(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A watched module has run: measure what it returned."""
        call = self.call
        if call is None or call.thread != threading.get_ident():
            return  # another thread's forward is under way; one at a time is followed
        if self.live is not None:
            if not call.paused:
                self._leave_live(self.live, call, watched, module, args, kwargs, output)
            if self.replaying:
                return
        elif not (watched.muted or call.paused or (watched.wrapper and self._memory.sequence > call.first)):
            try:
                if type(output) is Tensor and is_plain(output):
                    self._memory.record(watched.site("output", output.dtype, "output"), output)
                elif type(output) is tuple:  # most of the rest, without the general walk
                    for i, item in enumerate(output):
                        if type(item) is Tensor and is_plain(item):
                            self._memory.record(watched.site(f"output[{i}]", item.dtype, "output"), item)
                        elif item is not None:
                            self.record(watched, item, f"output[{i}]", "output")
                elif output is not None:
                    self.record(watched, output, "output", "output")
                if self._gradients is not None and call.grad:
                    self._gradients.watch(watched, output)
            except Exception as error:  # our failure is never the end of the run
                self._recorder.fail(error)
        if watched is call.watched:
            if call.depth:
                call.depth -= 1
            else:
                if call.grad and self.live is None and self._memory.on_host:  # gradients of a device are not waited for
                    self._recorder.guard(self.backwards.keep, call, output)
                self._finish(call)

    def record_compiled(self, watched: Watched, path: str, role: Role, pair: Tensor) -> None:
        """A tensor inside a compiled graph, at run time: its smallest and its largest element."""
        if self._in_compiled(watched):
            self._memory.record(watched.compiled_site(path, pair.dtype, role), pair)

    def record_output(self, watched: Watched, path: str, role: Role, value: Tensor) -> None:
        """What a root returns from inside a compiled graph."""
        if self._in_compiled(watched):
            self.record(watched, value, path, role)

    def record_rows(self, tensors: Sequence[RowsOf]) -> None:
        """The same for many tensors at once."""
        if not self._in_compiled(tensors[0].watched):
            return
        for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.magnitudes.device):
            same = list(group)
            sites = [t.watched.compiled_site(t.path, t.magnitudes.dtype, t.role) for t in same]
            self._memory.record_rows(sites, [t.magnitudes for t in same], [t.value for t in same])

    def _in_compiled(self, watched: Watched) -> bool:
        """Whether what a compiled graph records is wanted; opens a call for a part that was called by itself."""
        if self.live is not None:
            return False
        if self.call is None:
            if torch._C._current_graph_task_id() != -1:
                return False  # recomputed in backward; seen before
            self._recorder.guard(self._open, watched, watched.ref() or nn.Identity(), (), dict)
            if self.call is not None:
                self.call.implicit = True
        return True

    def mark_compiled(self, watched: Watched, enter: bool) -> None:
        """A root that is compiled whole begins or ends."""
        call, module = self.call, watched.ref()
        if enter and module is not None and call is None:
            self._recorder.guard(self._open, watched, module, (), dict)
            if self.call is not None:
                self.call.snapshot = None
                self.call.replay_reason = "the model is compiled as a whole, its arguments were not kept"
        elif not enter and call is not None and call.watched is watched and not call.wrapped:
            self._finish(call)

    def count_batch(self) -> None:
        """Count a training batch whose forward called parts of the root and not the root."""
        self.batches += 1
        self.micro_batch += 1

    def new_frames(self, on_frame: Callable[[str], None] | None = None, live: bool = True) -> Frames:
        recorder = self._recorder
        whole = not recorder.filter.include and not recorder.filter.exclude
        return Frames(recorder.max_frames_to_save, on_frame, whole, live)

    def close_stale(self) -> None:
        """Close a call that has ended without telling: its forward raised, or only a compiled part of it was called."""
        call = self.call
        if call is not None and not self.replaying and call.thread == threading.get_ident():
            module = call.watched.ref()
            if call.implicit or module is None or not _hub.running_now(module, skip=0):
                self.close(call)

    def close(self, call: Call) -> None:
        """The end of a call, however it ended: hand over what it recorded."""
        self.call = None
        live, self.live = self.live, None
        if live is not None:
            self._recorder.keep_frames(list(live.texts))
        if self._compiled_again is not None:
            self._compiled_again()
            self._compiled_again = None
        call.end = self._memory.sequence
        self._memory.forget_last()
        if call.paused or self._recorder.graphs.capturing:
            return
        if call.snapshot is not None and call.finished:
            self._recorder.guard(self._weights.measure_changed, call.snapshot.changed_buffers())
            call.end = self._memory.sequence
        self.trained = self.trained or call.grad
        if call.snapshot is not None:
            now = self._weights.buffer_versions()
            changed = {key for key, version in now.items() if call.buffers.get(key, version) != version}
            self._changing = (self._changing or set()) | changed
            self._copy_inputs = self._copy_inputs or call.snapshot.inputs_changed()
        if call.end > call.start:
            self.unread.append(call)
            self._recorder.guard(self._memory.publish, call.start, call.end)
        self._memory.calls.append(call)

    # One call.

    def _open(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], get_kwargs: Callable[[], dict[str, Any]]
    ) -> None:
        recorder = self._recorder
        if recorder.graphs.capturing:
            self.call = self.new_call(watched, self._memory.sequence)
            self.record(watched, args, "input", "input")
            return
        recorder.poll(wait=recorder.check != "async")
        recorder.ranks.heed()
        call = self.new_call(watched, self._memory.sequence)
        call.wrapped = watched.wrapper
        call.paused = tracing_now()
        self.call = call
        call.node = torch._C._autograd._get_sequence_nr()
        if call.paused:
            return
        if call.training and call.grad:
            recorder.batch_begins()
        kwargs = get_kwargs()
        call.token = not call.grad and any(kwargs.get(name) is not None for name in _CACHES)
        bad_weights = False
        self._weights.refresh()
        if self._weights.due:
            call.same_step = self._weights.last_step == call.step
            call.params_first, call.first = self._weights.measure(call.step)
            call.new_names = self._weights.new_names
            if call.new_names or recorder.check == "each":
                bad_weights = self._weights.first_look(call.params_first, call.first)
        self.record(watched, args, "input", "input")
        for key, value in kwargs.items():
            self.record(watched, value, f"input.{key}", "input")
        if recorder.inputs is not None:
            recorder.guard(recorder.inputs.keep, call, args, kwargs)
        if recorder.check != "each" or bad_weights:
            root = watched.root() if watched.wrapper else module
            self._take_snapshot(call, root or module, args, kwargs)
        if bad_weights:
            self.close(call)
            recorder.poll()
            self.call = call
        if self.batches in recorder.trace_batch_nums:
            self.live = self.new_frames(say)
        elif recorder.check == "each":
            self.live = self.new_frames()
        if self.live is not None:
            self.live.begin_batch(self.batches)
            self._compiled_again = _compiled.run_as_written()

    def new_call(self, watched: Watched, first: int) -> Call:
        module = watched.ref()
        return Call(
            watched,
            step=self._recorder.step,
            batch=self.batches,
            micro_batch=self.micro_batch,
            training=module.training if module is not None else True,
            grad=torch.is_grad_enabled(),
            first=first,
            thread=threading.get_ident(),
        )

    def _take_snapshot(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weights = self._weights
        try:
            parameters = weights.parameters()
            if weights.builds != self._checked:
                self._sharded = check_model(parameters)
                self._checked = weights.builds
            if self._sharded and not self._with_all():
                raise NotReplayable(self._sharded)
            changing = changing_buffers(weights.buffer_homes(), self._changing)
            buffers = weights.buffers(), weights.buffer_places()
            more = (buffers, changing, weights.version, self._copy_inputs, self._sharded)
            call.snapshot = Snapshot(module, args, kwargs, parameters, *more)
            call.buffers = weights.buffer_versions()
        except NotReplayable as reason:
            call.replay_reason = str(reason)
        except Exception as error:
            call.replay_reason = f"its inputs could not be kept ({type(error).__name__}: {error})"

    def _with_all(self) -> bool:
        """Whether all ranks may run a sharded forward again together: the run ends then, and nobody waits in vain."""
        recorder = self._recorder
        return self._memory.on_host and recorder.ranks.together is not None and recorder.ranks.stop

    @property
    def sharded(self) -> bool:
        """Whether a forward of this model needs all ranks, which can be asked to run it again."""
        return bool(self._sharded) and self._with_all()

    def _finish(self, call: Call) -> None:
        """A root forward has returned."""
        call.finished = True
        self.close(call)
        if self._recorder.graphs.capturing:
            self._recorder.graphs.saw_forward(call)
            return
        if call.paused or (call.watched.name and not self._recorder.roots.holds(call.watched.ref())):
            return
        self.batches += 1
        if call.training and call.grad:
            self.micro_batch += 1
        else:
            self.eval_batches += 1
            self.generated += call.token
        if not call.grad:
            self._recorder.poll(wait=self._recorder.check != "async")
            self._recorder.ranks.heed()
        elif self._memory.on_host:
            self._recorder.examine()  # the verdict is there, and so are the weights of this forward
        self._recorder.abort_if_last()

    def _leave_live(
        self, live: Frames, call: Call, watched: Watched, module: nn.Module, args: tuple[Any, ...],
        kwargs: dict[str, Any], output: Any,
    ) -> None:  # fmt: skip
        try:
            live.leave(watched, module, args, kwargs, output)
        except Exception as error:
            self._recorder.fail(error)
        if live.finding is not None and not live.done:
            live.done = True
            self._recorder.found_live(live, call)

    def record(self, watched: Watched | None, value: Any, path: str, role: Role) -> None:
        for name, leaf in leaves(value, path):
            if isinstance(leaf, Tensor):
                kind: Role = "loss" if name == "output.loss" else role
                for part in parts(leaf):
                    site = Site(None, name, leaf.dtype, kind) if watched is None else None
                    self._memory.record(site or watched.site(name, leaf.dtype, kind), part)  # type: ignore[union-attr]
