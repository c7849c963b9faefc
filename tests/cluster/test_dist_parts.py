"""Parts of a dist-test by themselves: patterns, odd settings, topology, how a check is called."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug.cluster.dist._evidence import empty, new_rank
from mldebug.cluster.dist._local import devices_here
from mldebug.cluster.dist._odd import cpu_list, odd_settings
from mldebug.cluster.dist._text import ranges
from mldebug.cluster.dist._topology import topology


def collectives(world: int, rank: int = 0) -> Any:
    torch = pytest.importorskip("torch")
    from mldebug.cluster.dist._collectives import Collectives

    device = SimpleNamespace(kind="cpu", torch_device=torch.device("cpu"), sync=lambda: None)
    return Collectives(rank, world, device, (), SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64, 65, 100, 129, 512, 1000])
def test_sums_of_patterns_are_exact_in_bf16_in_any_order(world: int) -> None:
    torch = pytest.importorskip("torch")
    tests = collectives(world)
    parts = [tests.part(rank, 2000, torch.float32) for rank in range(world)]
    total = torch.stack(parts).sum(0)
    assert torch.equal(tests.total(2000, torch.float32), total) and 0 < total.max() <= 256
    running = torch.zeros(2000, dtype=torch.bfloat16)
    for part in reversed(parts):
        running += part.to(torch.bfloat16)
    assert torch.equal(running.to(torch.float32), total)


@pytest.mark.parametrize("world", [2, 8, 100, 512])
def test_patterns_tell_ranks_and_chunks_apart(world: int) -> None:
    torch = pytest.importorskip("torch")
    tests = collectives(world)
    seen = {tuple(tests.part(rank, 1021, torch.bfloat16).tolist()) for rank in range(world)}
    assert len(seen) == world
    assert not torch.equal(tests.part(1, 500, torch.float32, salt=1), tests.part(1, 500, torch.float32, salt=2))
    long = tests.part(1, 4096, torch.float32)
    assert not torch.equal(long[:1024], long[1024:2048])  # a chunk in another's place is seen


def test_whose_part_of_a_sum_is_missing_or_there_twice() -> None:
    torch = pytest.importorskip("torch")
    tests = collectives(4)
    want = tests.total(64, torch.float32)
    for sign in (-1, 1):
        (found,) = tests._wrong_sum(want + sign * tests.part(2, 64, torch.float32), 0)
        assert found["source"] == 2
    odd = want.clone()
    odd[7] += 1
    (found,) = tests._wrong_sum(odd, 0)
    assert (found["source"], found["count"], found["index"]) == (None, 1, 7)
    assert tests._wrong_sum(want, 0) == []


def test_the_plan_is_the_same_on_all_ranks_and_has_all_sizes() -> None:
    plans = [list(collectives(4, rank).plan()) for rank in range(4)]
    assert all(plan == plans[0] for plan in plans)
    sizes = {size for name, dtype, size in plans[0] if name == "all_reduce" and dtype == "fp32"}
    assert min(sizes) == 4 and max(sizes) == 64 << 20


def test_what_is_called_how() -> None:
    pytest.importorskip("torch")
    from mldebug.cluster.dist._collectives import label

    assert [label("all_reduce", "bf16", size) for size in (4, 65536, 64 << 20)] == [
        "all_reduce bf16 4 B", "all_reduce bf16 64 KiB", "all_reduce bf16 64 MiB",
    ]  # fmt: skip
    assert label("barrier", "", 0) == "barrier"
    assert ranges([5, 1, 2, 0, 7]) == "0-2, 5, 7" and ranges([]) == ""
    assert cpu_list("0-3,8") == {0, 1, 2, 3, 8} and cpu_list("") == set()


@pytest.mark.parametrize(
    "facts, word",
    [
        ({"cpus": [3]}, "one CPU only"),
        ({"cpus": [0, 1]}, "none of the CPUs next to its GPU (NUMA node 1)"),
        ({"shm": 64 << 20}, "/dev/shm has 64 MiB free"),
        (
            {"infiniband": ["mlx5_0/1 ACTIVE 400 Gb/sec InfiniBand"], "memlock": 8 << 20},
            "memlock is limited to 8192 KiB",
        ),
        ({"infiniband": ["mlx5_0/1 INIT 400 Gb/sec InfiniBand"]}, "InfiniBand port mlx5_0/1 INIT"),
        ({"libraries": ["/a/libnccl.so.2", "/b/libnccl.so.2", "/a/libnccl-net.so"]}, "has 2 NCCL libraries loaded"),
        ({}, ""),
    ],
)
def test_odd_settings(facts: dict[str, Any], word: str) -> None:
    seen = empty(2, "nccl", 30.0)
    for rank in range(2):
        one = new_rank(rank, rank, "h", "", 1, 1)
        one["facts"] = {
            "device": {"kind": "cuda", "index": rank, "numa_node": "1", "local_cpulist": "64-127"}, "shm": 1 << 40,
            "cpus": [64, 65], "memlock": -1, **facts,
        }  # fmt: skip
        seen["ranks"][str(rank)] = one
    found = list(odd_settings(seen))
    assert len(found) == bool(word) and (not word or (word in found[0] and found[0].startswith("ranks 0, 1: ")))


def test_topology_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def state(handle: int, link: int) -> int:
        if link >= 12:  # an H100 NVL has 12 of 18
            raise OSError("not supported")
        return int(link != 5)

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]),
        nvmlDeviceGetNvLinkState=state, nvmlDeviceGetCount=lambda: 4, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: 50 if other > 1 else 20,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert topology("1") == {"NVLinks": "11 of 12 up", "other GPUs over": "2 SYS, 1 PXB"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert topology("1") == {}


@pytest.mark.parametrize(
    "env, count",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"HIP_VISIBLE_DEVICES": "4"}, 1),
    ],
)
def test_how_many_devices_are_visible(env: dict[str, str], count: int) -> None:
    assert devices_here(env) == count
