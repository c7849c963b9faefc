"""CUDA graphs: modules run once, while the graph is captured, and never again when it is replayed.

What the hooks record during a capture becomes part of the graph, in a ring of its own; each replay fills it again, and
its verdict is read where that of a forward would be: before the next replay or forward, or before an optimizer steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics.ring._graph_ring import GraphRing
from mldebug.numerics.ring._records import IN_GRAPH, Call
from mldebug.numerics.ring._triton_ring import TritonRing

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_KEYS = count(-2, -1)  # each captured graph is a device of its own to the recorder's memory


@dataclass
class _Captured:
    """What one recorder has of one graph."""

    recorder: weakref.ref[DebugUnderflowOverflow]
    ring: GraphRing | None
    key: int = field(default_factory=lambda: next(_KEYS))
    call: Call | None = None  # of the last forward in it
    forwards: int = 0
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)  # that step in it, in order


# A graph writes to its ring whenever it is replayed, also after the recorder has gone.
_CAPTURED: weakref.WeakKeyDictionary[Any, list[_Captured]] = weakref.WeakKeyDictionary()


class CudaGraphs:
    """The CUDA graphs that one recorder has seen captured."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._under_way: _Captured | None = None
        self._captured: list[_Captured] = []
        self._due: list[weakref.ref[torch.optim.Optimizer]] = []  # steps of replays that were not counted yet

    @property
    def capturing(self) -> bool:
        """Whether a graph is being captured: nothing runs, nothing may be waited for, and nothing counts."""
        return self._under_way is not None

    def begin(self) -> None:
        """A capture is about to begin."""
        recorder = self._recorder
        if recorder.forwards.call is None:
            recorder.poll()
        if not recorder.attached:
            return
        ring, device = None, torch.device("cuda", torch.cuda.current_device())
        if TritonRing.available(device):
            try:
                ring = GraphRing(device, recorder.memory.site)
            except Exception as error:  # no memory, say: the capture must not meet the ordinary ring
                recorder.fail(error)
        else:
            recorder.remark("what runs in CUDA graphs is not measured: that needs Triton")
        recorder.memory.begin_capture(ring)
        self._under_way = _Captured(weakref.ref(recorder), ring)

    def end(self, graph: Any) -> None:
        """It has ended; `graph` is None where it failed."""
        captured, self._under_way = self._under_way, None
        if captured is None:
            return
        recorder = self._recorder
        recorder.memory.end_capture()
        ring = captured.ring
        if ring is not None:
            ring.captured()
        if graph is None or not (captured.optimizers or (ring is not None and ring.sites)):
            return
        _CAPTURED.setdefault(graph, []).append(captured)
        self._captured.append(captured)
        if ring is not None and ring.left_out:
            recorder.remark(
                f"{ring.left_out} tensors of a CUDA graph are not measured: it has too many, or other devices"
            )
        recorder.when_dead(graph, recorder.memory.forget_graph, captured.key)

    def saw_forward(self, call: Call) -> None:
        """A root forward was captured."""
        if self._under_way is not None:
            self._under_way.call = replace(call, replay_reason=IN_GRAPH)
            self._under_way.forwards += 1

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of an optimizer was captured."""
        if self._under_way is not None:
            self._under_way.optimizers.append(weakref.ref(optimizer))

    def settle(self) -> None:
        """Before a graph is replayed: read what the last one has left, as before a forward."""
        recorder = self._recorder
        if recorder.forwards.call is None:
            recorder.poll(wait=recorder.check != "async")
            recorder.ranks.heed()

    def clear(self) -> None:
        """The recorder leaves: graphs keep the memory that they write to, and nothing else."""
        for captured in self._captured:
            captured.call = None
            if captured.ring is not None:
                captured.ring.sites.clear()
        self._captured.clear()
        self._due.clear()

    def replayed(self, captured: _Captured) -> None:
        """A graph was launched: give its records numbers, and make a call of them where no forward is under way."""
        recorder, ring = self._recorder, captured.ring
        memory, forwards = recorder.memory, recorder.forwards
        if ring is not None and ring.sites:
            first = memory.sequence
            memory.replayed(captured.key, ring)
            if forwards.call is None:
                self._enter_call(captured, first)
        self._due += captured.optimizers

    def count_steps(self) -> None:
        """Count the optimizer steps of replays whose verdict was read."""
        due, self._due = self._due, []
        for ref in due:
            optimizer = ref()
            if optimizer is not None:
                self._recorder.steps.count(optimizer)

    def _enter_call(self, captured: _Captured, first: int) -> None:
        recorder = self._recorder
        forwards, memory = recorder.forwards, recorder.memory
        if captured.call is None:  # a loss alone, or the backward of a part of the model
            call = forwards.new_call(recorder.roots.outside(), first)
            call.batch = max(call.batch - 1, 0)
        else:
            call = replace(
                captured.call, step=recorder.step, batch=forwards.batches, micro_batch=forwards.micro_batch, first=first
            )
        call.end, call.finished = memory.sequence, True
        forwards.unread.append(call)
        memory.calls.append(call)
        forwards.batches += captured.forwards
        if call.training and call.grad:
            forwards.micro_batch += captured.forwards
            forwards.trained = forwards.trained or captured.forwards > 0


def install(recorders: Sequence[DebugUnderflowOverflow], undone_by: list[Callable[[], None]]) -> None:
    """Tell these recorders when a CUDA graph is captured and replayed. What undoes it is put into `undone_by` first."""
    home: Any = torch.cuda.CUDAGraph
    begin_before, end_before, replay_before = home.capture_begin, home.capture_end, home.replay
    at_work = True

    @functools.wraps(begin_before)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            for recorder in list(recorders) if at_work else ():
                recorder.guard(recorder.graphs.begin)
            return begin_before(self, *args, **kwargs)
        except BaseException:
            _end(recorders, None)
            raise

    @functools.wraps(end_before)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = None
        try:
            result = end_before(self, *args, **kwargs)
            graph = self
            return result
        finally:
            _end(recorders, graph)

    @functools.wraps(replay_before)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = _CAPTURED.get(self) if at_work else None
        watched = [(r, captured) for captured in found or () if (r := captured.recorder()) is not None and r.attached]
        for recorder, _ in watched:
            recorder.guard(recorder.graphs.settle)
        result = replay_before(self, *args, **kwargs)
        for recorder, captured in watched:
            if recorder.attached:
                recorder.guard(recorder.graphs.replayed, captured)
        return result

    ours = {"capture_begin": capture_begin, "capture_end": capture_end, "replay": replay}
    before = {"capture_begin": begin_before, "capture_end": end_before, "replay": replay_before}

    def undo() -> None:
        nonlocal at_work
        at_work = False
        for name, function in ours.items():
            if getattr(home, name) is function:  # else somebody has put theirs around it
                setattr(home, name, before[name])

    undone_by.append(undo)
    for name, function in ours.items():
        setattr(home, name, function)


def _end(recorders: Sequence[DebugUnderflowOverflow], graph: Any) -> None:
    for recorder in list(recorders):
        recorder.guard(recorder.graphs.end, graph)
