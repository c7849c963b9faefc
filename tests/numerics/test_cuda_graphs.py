"""What is recorded while a CUDA graph is captured has no numbers; a replay gives it some. Capture and replay themselves
need a GPU: see tests/gpu/test_graphs_gpu.py."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from mldebug import DebugUnderflowOverflow, NumericsError
from mldebug.numerics import _hub
from mldebug.numerics._report import NumericsWarning
from mldebug.numerics.ring._graph_ring import GraphRing
from mldebug.numerics.ring._memory import Memory
from mldebug.numerics.ring._records import Site
from mldebug.numerics.ring._stats import Stats


class Replayed:
    """Stands for the ring of a graph: what its latest replay has recorded is given."""

    def __init__(self, count: int) -> None:
        self.device = torch.device("cpu")
        self.sites = [Site(None, f"value{i}", torch.float32, "output") for i in range(count)]
        self.numels = array("q", [3] * count)
        self.base, self.alarm, self.bad = 0, -1, -1
        self.kept: list[torch.Tensor] = []

    def record_many(self, tensors: Sequence[torch.Tensor], base: int, strict: bool = False) -> None:
        self.kept += tensors

    def record(self, tensor: torch.Tensor, slot: int, strict: bool = False) -> None:
        self.kept.append(tensor)

    def reset(self, first: int, count: int) -> None: ...

    def publish(self, first: int, count: int) -> None: ...

    def replayed(self, base: int) -> None:
        self.base = base

    def flag(self, wait: bool) -> tuple[int, int]:
        return (self.base + self.alarm if self.alarm >= 0 else -1), -1

    def clear_flag(self) -> None:
        self.alarm = -1

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        found = [slot - self.base for slot in slots]
        return [Stats(0.0, math.inf if i == self.bad else float(i)) for i in found]


def test_records_of_a_capture_have_no_numbers() -> None:
    memory, ring, site = Memory(), Replayed(0), Site(None, "x", torch.float32, "output")
    ring.device = torch.device("cuda", 0)  # tensors of other devices are left alone
    memory.record(site, torch.ones(5))
    before = memory.sequence
    memory.begin_capture(ring)  # type: ignore[arg-type]
    for _ in range(3000):  # more than what is made ready at a time
        memory.record(site, torch.tensor([float("nan")]))
    assert memory.flags(wait=True) == (None, None)
    memory.end_capture()
    assert memory.sequence == before and memory.flags(wait=True) == (None, None)
    memory.record(site, torch.full((5,), 2.0))
    assert [stats.hi for stats in memory.stats([0, 1])] == [1.0, 2.0]


@pytest.mark.parametrize("start", [0, (1 << 16) - 2], ids=["begin", "around the end"])
def test_each_replay_takes_numbers_of_its_own(start: int) -> None:
    memory, ring, site = Memory(), Replayed(4), Site(None, "x", torch.float32, "output")
    memory.sequence = start
    memory.record(site, torch.ones(2))
    memory.replayed(-2, ring)  # type: ignore[arg-type]
    memory.record(site, torch.zeros(2))
    assert memory.sequence == start + 6
    memory.replayed(-2, ring)  # type: ignore[arg-type]
    assert [memory.site(start + 6 + i).path for i in range(4)] == ["value0", "value1", "value2", "value3"]
    assert [stats.hi for stats in memory.stats([start, start + 5])] == [1.0, 0.0]
    ring.base = start + 6  # without the wrap, so that the numbers below are plain
    assert [stats.hi for stats in memory.stats([start + 5])] == [0.0]
    ring.base = (start + 6) & ((1 << 16) - 1)
    ring.alarm = 2
    assert memory.flags(wait=True) == (start + 8, None)
    memory.clear_flags()
    assert memory.flags(wait=True) == (None, None)


def test_a_graph_that_is_gone_has_nothing_to_read() -> None:
    memory, ring = Memory(), Replayed(2)
    memory.replayed(-2, ring)  # type: ignore[arg-type]
    memory.forget_graph(-2)
    assert memory.flags(wait=True) == (None, None)
    assert not any(stats.alarms() for stats in memory.stats([0, 1]))


def test_torch_is_as_it_was_when_the_recorder_has_left() -> None:
    graph: Any = torch.cuda.CUDAGraph
    before = graph.capture_begin, graph.capture_end, graph.replay
    with DebugUnderflowOverflow(nn.Linear(2, 2)):
        assert graph.replay is not before[2]
    assert (graph.capture_begin, graph.capture_end, graph.replay) == before


def test_a_module_in_a_graph_is_named_and_not_the_one_that_holds_the_graph() -> None:
    """As make_graphed_callables has it: in a forward that runs again the inner modules would not be called."""

    class Graphed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recorder.memory.replayed(-2, ring)  # type: ignore[arg-type]
            return x * float("inf")

    model = nn.Sequential(nn.Linear(3, 3), Graphed(), nn.Linear(3, 1))
    ring = Replayed(3)
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model) as recorder:
        watched = _hub.find(recorder, model[1].inner)  # type: ignore[arg-type]
        assert watched is not None
        ring.sites[1] = watched.site("output", torch.float32, "output")
        ring.alarm, ring.bad = 1, 1
        model(torch.randn(2, 3)).sum().backward()
    event = caught.value.report.event
    assert event is not None and (event.module, event.kind, event.again) == ("1.inner", "inf", "not replayable")
    assert "CUDA graph" in caught.value.report.text()


class OnHost:
    """Stands for the ring on the device: what it records is there when a replay is published."""

    def __init__(self, device: torch.device, slots: int) -> None:
        self.seen: list[torch.Tensor] = []

    def record(self, tensor: torch.Tensor, slot: int, strict: bool = False, reset: bool = False) -> None:
        self.seen[slot:] = [tensor]

    def reset(self, first: int, count: int) -> None: ...

    def clear_flag(self) -> None: ...

    def copy_rows(self, count: int) -> None: ...

    def publish(self, first: int, count: int) -> None: ...

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        return [Stats(self.seen[slot].min().item(), self.seen[slot].max().item()) for slot in slots]


def test_a_replay_is_read_when_the_recorder_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report is asked for after the scope, and then the graph has let the sites go."""
    monkeypatch.setattr("mldebug.numerics.ring._graph_ring.CudaRing", OnHost)
    site = Site(None, "x", torch.float32, "output")
    ring = GraphRing(torch.device("cpu"), lambda slot: site)
    ring.record(torch.tensor([1.0, 4.0]), 7)
    ring.captured()
    ring.replayed(100)
    ring.sites.clear()
    assert [(one.lo, one.hi) for one in ring.stats([100])] == [(1.0, 4.0)]


def test_a_capture_that_cannot_be_measured_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may wait for the device while it is captured, so the ordinary ring is out of the way all the same."""

    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("mldebug.numerics._cuda_graphs.GraphRing", no_memory)
    monkeypatch.setattr("mldebug.numerics._cuda_graphs.TritonRing.available", lambda device: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    model = nn.Linear(2, 2)
    with DebugUnderflowOverflow(model) as recorder:
        with pytest.warns(NumericsWarning, match="out of memory"):
            recorder.graphs.begin()
        assert recorder.graphs.capturing
        model(torch.full((1, 2), float("nan")))
        recorder.graphs.end(None)
        assert recorder.batch_number == 0
        model(torch.ones(1, 2))
    assert recorder.report.event is None and recorder.batch_number == 1
