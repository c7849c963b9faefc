"""The device ring against plain torch, on a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch

from mldebug.numerics.ring import _triton_ring
from mldebug.numerics.ring._triton_ring import DTYPES, SlotStats, TritonRing

pytestmark = pytest.mark.gpu

INF, NAN = math.inf, math.nan
EMPTY = SlotStats(INF, -INF, INF, 0, 0, 0, 0, 0)


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", 0)
    if not TritonRing.available(device):
        pytest.skip("no CUDA device with Triton")
    return device


@pytest.fixture
def ring(device: torch.device) -> TritonRing:
    return TritonRing(device, slots=4096)


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def expected(tensor: torch.Tensor) -> SlotStats:
    values = tensor.float()
    values = values[~values.isnan()]
    bits = tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16).long() & (
        0x7FFFFFFF if tensor.dtype is torch.float32 else 0x7FFF
    )
    smallest = {torch.float16: 0x400, torch.bfloat16: 0x80, torch.float32: 0x800000}[tensor.dtype]
    lo, hi, small = INF, -INF, INF
    if values.numel():
        lo, hi, small = values.min().item(), values.max().item(), values.abs().min().item()
    counts = (tensor.isnan(), tensor == INF, tensor == -INF, bits == 0, (bits > 0) & (bits < smallest))
    return SlotStats(lo, hi, small, *[int(where.sum()) for where in counts])


def read(ring: TritonRing, *slots: int) -> list[SlotStats]:
    ring.publish(0, ring.slots)
    return ring.read(slots)


def flag(ring: TritonRing) -> tuple[int, int]:
    ring.publish(0, 1)
    found = ring.flag(wait=True)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 7, 256, 2049, 8191, 8192, 8193, 100_003, 4_325_377, 20_000_003])
def test_plain_values(ring: TritonRing, device: torch.device, dtype: torch.dtype, size: int) -> None:
    tensors = [torch.randn(size, device=device).to(dtype)]
    tensors += [-tensors[0].abs() - 1, tensors[0].abs() + 1, torch.zeros_like(tensors[0])]
    for slot, tensor in enumerate(tensors):
        ring.record(tensor, slot)
    assert read(ring, 0, 1, 2, 3, 4) == [*map(expected, tensors), EMPTY]
    assert flag(ring) == (-1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8192, 70_001, 9_000_001])
def test_planted_values(ring: TritonRing, device: torch.device, dtype: torch.dtype, size: int) -> None:
    random.seed(size)
    tiny = torch.finfo(dtype).tiny
    tensors = []
    for values in (
        [NAN],
        [INF],
        [-INF],
        [0.0, -0.0],
        [tiny / 4, -tiny / 2],
        [NAN, INF, -INF, 0.0, tiny / 2, -tiny / 8],
    ):
        for places in ([0, size - 1], [random.randrange(size) for _ in range(20)]):
            tensor = torch.randn(size, device=device).to(dtype)
            for i, place in enumerate(places):
                tensor[place] = values[i % len(values)]
            tensors.append(tensor)
    tensors.append(torch.full((size,), NAN, device=device, dtype=dtype))
    for slot, tensor in enumerate(tensors):
        ring.clear_flag()
        ring.record(tensor, slot)
        stats = expected(tensor)
        assert flag(ring)[0] == (slot if stats.nan or stats.posinf else -1)
    assert read(ring, *range(len(tensors))) == [*map(expected, tensors)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 3, 8])
def test_views_at_odd_addresses(ring: TritonRing, device: torch.device, dtype: torch.dtype, shift: int) -> None:
    whole = torch.randn(300_000, device=device).to(dtype)
    whole[shift - 1] = NAN  # outside the view
    for slot, view in enumerate((whole[shift:], whole[shift:-1], whole[shift : shift + 5])):
        ring.record(view, slot)
        assert read(ring, slot) == [expected(view)]
    assert flag(ring) == (-1, -1)
    whole[-1] = INF
    ring.record(whole[shift:], 9)
    assert flag(ring)[0] == 9


def test_the_first_alarm_in_execution_order(ring: TritonRing, device: torch.device) -> None:
    for i in range(60):
        tensor = torch.randn(200_000, device=device, dtype=torch.bfloat16)
        if i in (17, 23, 41):
            tensor[i * 1000] = NAN if i == 23 else INF
        ring.record(tensor, 4090 + i if i < 6 else i - 6)
    assert flag(ring)[0] == 11
    ring.clear_flag()
    assert ring.flag(wait=False) == (-1, -1)
    assert flag(ring) == (-1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_no_alarm_and_near_is_near(ring: TritonRing, device: torch.device, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    cases = {-INF: -1, -limit: -1, limit / 5: -1, limit / 4: 1, -limit / 4: 1, limit: 1, -limit / 2: 1}
    for value, near in cases.items():
        tensor = torch.zeros(50_000, device=device, dtype=dtype)
        tensor[12_345] = value
        ring.record(tensor, 1)
        assert flag(ring) == (-1, near), value
        ring.clear_flag()


def test_reset_and_publish_go_around_the_end(device: torch.device) -> None:
    ring = TritonRing(device, slots=64)
    tensors = [torch.full((10,), float(i), device=device) for i in range(100)]
    for i, tensor in enumerate(tensors):
        if i % 16 == 0:
            ring.reset(i % 64, 16)
        ring.record(tensor, i % 64)
    ring.publish(60, 20)
    assert [stats.hi for stats in ring.read([60, 63, 0, 15])] == [60.0, 63.0, 64.0, 79.0]
    ring.reset(60, 8)
    assert read(ring, 59, 60, 63, 0, 3, 4) == [expected(tensors[59]), *[EMPTY] * 4, expected(tensors[68])]


def test_many_of_all_dtypes_and_new_addresses(ring: TritonRing, device: torch.device) -> None:
    sizes = (1, 0, 768, 65_536, 65_537, 1_000_003)
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes for dtype in DTYPES]
    tensors.append(torch.randn(1001, device=device)[1:])
    base = 4090  # goes around the end
    slots = [(base + i) % ring.slots for i in range(len(tensors))]
    for _ in range(3):
        ring.reset(base, len(tensors))
        ring.record_many(tensors, base)
        assert read(ring, *slots) == [*map(expected, tensors)]
        tensors[5] = torch.randn(99, device=device)
        tensors[-1].mul_(2)
    assert flag(ring) == (-1, -1)
    for i in (12, 16, 17):
        tensors[i][-1] = NAN
        tensors[i][0] = INF
    ring.record_many(tensors, base)
    assert flag(ring)[0] == slots[12]
    ring.record_many(tensors[15:], 100)
    assert flag(ring)[0] == slots[12]
    ring.record_many([], 0)


def test_nothing_synchronises(ring: TritonRing, device: torch.device, no_sync: None) -> None:
    tensors = [torch.ones(1000, device=device, dtype=dtype) for dtype in DTYPES]
    for step in range(3):
        ring.reset(0, 16)
        for slot, tensor in enumerate(tensors):
            ring.record(tensor, slot, reset=step == 1)
        ring.record_many(tensors, 8)
        ring.clear_flag()
        ring.publish(0, 16)
        ring.flag(wait=False)
    assert ring.flag(wait=True) == (-1, -1)
    assert [stats.lo for stats in ring.read([0, 1, 2, 8, 9, 10])] == [1.0] * 6


def test_flag_without_waiting(ring: TritonRing, device: torch.device) -> None:
    assert ring.flag(wait=False) == (-1, -1)
    torch.cuda._sleep(200_000_000)
    ring.record(torch.full((8,), NAN, device=device), 3)
    ring.publish(3, 1)
    assert ring.flag(wait=False) is None
    assert ring.flag(wait=True) == (3, -1)
    assert ring.flag(wait=False) == (3, -1)


def test_a_captured_graph_records_at_each_replay(ring: TritonRing, device: torch.device) -> None:
    source = torch.randn(100_000, device=device)
    ring.record(source * 2, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source * 2
        ring.record(result, 7, reset=True)
    for factor in (1.0, 0.25):
        source.mul_(factor)
        graph.replay()
        assert read(ring, 7) == [expected(source * 2)]
    assert flag(ring) == (-1, -1)
    source[5] = NAN
    graph.replay()
    assert flag(ring)[0] == 7
    assert read(ring, 7)[0].nan == 1


def test_other_streams_gradients_and_inference(ring: TritonRing, device: torch.device) -> None:
    tensor = torch.randn(5000, device=device, requires_grad=True)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        ring.record(tensor, 1)
        ring.record_many([tensor], 2)
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.inference_mode():
        ring.reset(3, 1)
        ring.record(tensor * 1, 3)
        assert read(ring, 1, 2, 3) == [expected(tensor.detach())] * 3
    ring.reset(1, 3)
    with torch.inference_mode():
        inside = TritonRing(device, slots=8)
    inside.reset(0, 8)
    inside.record(tensor, 0)
    assert read(inside, 0) == [expected(tensor.detach())]


def test_the_ordinary_launch_serves_where_the_direct_one_does_not(device: torch.device) -> None:
    ring = TritonRing(device, slots=8)
    tensor = torch.randn(20_000, device=device)

    def refuse(*args: object) -> None:
        raise TypeError("another inner form")

    launch = ring._aligned[torch.float32]
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    cells["call"].cell_contents = refuse
    ring.record(tensor, 1)
    ring.record(tensor, 2)
    assert cells["direct"].cell_contents is False
    assert read(ring, 1, 2) == [expected(tensor)] * 2


@pytest.mark.parametrize("extra", [0, 12_345])
def test_more_elements_than_one_launch_takes(ring: TritonRing, device: torch.device, extra: int) -> None:
    size = (1 << 30) + extra
    tensor = torch.ones(size, device=device, dtype=torch.bfloat16)
    tensor[0], tensor[-1], tensor[1 << 29] = -3.0, 5.0, 0.0
    ring.record(tensor, 2)
    assert read(ring, 2) == [SlotStats(-3.0, 5.0, 0.0, 0, 0, 0, 1, 0)]
    assert flag(ring) == (-1, -1)
    tensor[-1] = NAN
    tensor[7] = INF
    ring.record(tensor, 3)
    assert flag(ring)[0] == 3
    assert read(ring, 3) == [SlotStats(-3.0, INF, 0.0, 1, 1, 0, 1, 0)]


def test_another_device_than_the_current_one(device: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    second = torch.device("cuda", 1)
    ring = TritonRing(second)
    tensor = torch.randn(5000, device=second)
    ring.record(tensor, 0)
    ring.record_many([tensor], 1)
    assert read(ring, 0, 1) == [expected(tensor)] * 2
    assert torch.cuda.current_device() == 0


def test_memory_of_the_default_ring(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(device)
    ring = TritonRing(device)
    assert torch.cuda.memory_allocated(device) - before <= 8 << 20
    ring.record(torch.ones(4, device=device), ring.slots - 1)
    ring.publish(ring.slots - 1, 1)
    assert ring.read([ring.slots - 1])[0].hi == 1.0


def test_not_available_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_ring, "_kernels", None)
    assert not TritonRing.available(torch.device("cuda", 0))
    with pytest.raises(RuntimeError):
        TritonRing(torch.device("cuda", 0))
