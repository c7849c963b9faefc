"""core.device: which accelerator is here, and which GPU it is for NVML."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mldebug.core.device import Device, find_device, host_memory, seconds_between, visible_gpus
from mldebug.core.errors import UsageError


def test_importing_it_loads_no_torch(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python(
        "import sys, mldebug.core.device, mldebug.perf; print(sorted({'torch', 'pynvml'} & {*sys.modules}))"
    )
    assert done.stdout == "[]\n", done.stderr


def test_the_cpu_is_always_there_and_its_marks_take_time() -> None:
    device = find_device("cpu")
    assert (device.kind, device.index, device.count(), device.uuid, device.nvml()) == ("cpu", 0, 1, "", None)
    assert device.name
    first = device.mark()
    time.sleep(0.02)
    last = device.mark()
    device.synchronize()
    assert 0.02 <= seconds_between(first, last) < 2
    free, total = device.memory()
    assert 0 < free <= total
    assert (free, total) == pytest.approx(host_memory(), rel=0.2)


@pytest.mark.parametrize(
    ("kind", "index", "words"),
    [
        ("tpu", None, "no kind of device is named 'tpu'"),
        ("mps", None, "there is no mps device here"),
        ("cpu", 3, "there is no cpu device 3"),
    ],
)
def test_what_is_not_here_is_refused(kind: str, index: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_device(kind, index)


def test_out_of_memory_is_told_from_other_failures() -> None:
    device = Device("cpu", 0)
    assert device.out_of_memory(MemoryError())
    assert device.out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9"))
    assert not device.out_of_memory(RuntimeError("shape mismatch"))
    assert not device.out_of_memory(ValueError("out of memory"))


class FakeNvml(SimpleNamespace):
    """Four GPUs whose handles are their UUIDs."""

    uuids = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.uuids[index]

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "MIG-77":
            raise LookupError(uuid)
        return uuid


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, [*FakeNvml.uuids]),
        ("", []),
        ("2", ["GPU-bb33"]),
        ("3,0", ["GPU-cc44", "GPU-aa11"]),
        ("1,7,2", ["GPU-aa22"]),
        ("-1", []),
        ("GPU-bb,0", ["GPU-bb33", "GPU-aa11"]),
        ("GPU-aa", []),  # two of them begin so
        ("MIG-77", ["MIG-77"]),
        ("MIG-88", []),
    ],
    ids=["unset", "empty", "one", "two", "ends_at_bad", "none", "uuid", "ambiguous", "mig", "bad_mig"],
)
def test_cuda_visible_devices_picks_the_handles(value: str | None, seen: list[str]) -> None:
    env: dict[str, Any] = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert visible_gpus(FakeNvml(), env) == seen
