"""Memory of the accelerator: what torch holds of it, what its driver sees, and who else is on it.

Nothing here begins to use the device: a process that has not touched CUDA yet can still be forked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from mldebug.core.device import Device, load_nvml, visible_gpus
from mldebug.core.world import world


@dataclass(frozen=True)
class Card:
    """Bytes; None where nobody says. `device` is the device as torch counts ("cuda:0"), `physical` its number for the
    driver (nvidia-smi), whatever CUDA_VISIBLE_DEVICES says."""

    device: str
    physical: int | None = None
    allocated: int | None = None  # in tensors
    reserved: int | None = None  # that torch's caching allocator has taken from the driver
    peak: int | None = None  # the largest `allocated` since the process began, or since the peak was reset
    requested: int | None = None  # `allocated` without what the allocator adds by rounding up
    stuck: int | None = None  # free pieces of blocks that are partly in use: only tensors that fit in can have them
    used: int | None = None  # on the whole card, by the driver
    total: int | None = None
    others: int | None = None  # bytes of other processes
    other_processes: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """The share of the reserved memory that is free and cannot be given back: `stuck` / `reserved`."""
        if self.stuck is None or not self.reserved:
            return None
        return self.stuck / self.reserved


def look_at_card() -> Card:
    """The device that torch uses in this thread, else the one that the rank will most likely use."""
    device = used_device()
    if device is None:
        return _unused()
    if device.kind in ("cuda", "rocm"):
        return _cuda(device)
    if device.kind == "xpu":
        return _xpu(device)
    return _mps(device) if device.kind == "mps" else Card("cpu")


def used_device() -> Device | None:
    """What torch has begun to use in this process; None while that is nothing but the CPU, on a machine with more."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_available():
        if not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
            return None
        return Device("rocm" if torch.version.hip else "cuda", int(torch.cuda.current_device()))
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return Device("xpu", int(torch.xpu.current_device())) if torch.xpu.is_initialized() else None
    if hasattr(torch.backends, "mps") and torch.backends.mps.is_available():
        return Device("mps", 0)
    return Device("cpu", 0)


def _cuda(device: Device) -> Card:
    stats = device.module.memory_stats(device.index)
    nvml, handle = device.nvml() or (None, None)
    used = total = None
    if not device.module.is_current_stream_capturing():  # a capture may not be mixed with calls into the driver
        with contextlib.suppress(Exception):
            free, total = device.memory()
            used = total - free
    if used is None and nvml is not None:
        used, total = _nvml_memory(nvml, handle)
    others, processes = _others(nvml, handle, in_use=True) if nvml is not None else (None, None)
    return Card(
        f"{device.type}:{device.index}",
        device.physical_index(),
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        stats.get("requested_bytes.all.current"),
        stats.get("inactive_split_bytes.all.current"),
        used,
        total,
        others,
        processes,
    )


def _xpu(device: Device) -> Card:
    stats = device.module.memory_stats(device.index)
    used = total = None
    with contextlib.suppress(Exception):
        free, total = device.memory()
        used = total - free
    return Card(
        f"xpu:{device.index}",
        None,
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        used=used,
        total=total,
    )


def _mps(device: Device) -> Card:
    free, total = device.memory()
    allocated = int(device.module.current_allocated_memory())
    return Card(
        "mps", None, allocated, int(device.module.driver_allocated_memory()), None, used=total - free, total=total
    )


def _unused() -> Card:
    """CUDA is not in use here yet. NVML tells of the card of this rank without a context on it."""
    nvml = load_nvml()
    if nvml is None:
        return Card("cpu")
    try:
        handles = visible_gpus(nvml)
    except Exception:
        handles = []
    if not handles:
        return Card("cpu")
    # A launcher that leaves one GPU visible to each rank numbers the ranks all the same.
    index = world().local_rank % len(handles)
    used, total = _nvml_memory(nvml, handles[index])
    others, processes = _others(nvml, handles[index], in_use=False)
    physical = None
    with contextlib.suppress(Exception):
        physical = int(nvml.nvmlDeviceGetIndex(handles[index]))
    return Card(f"cuda:{index}", physical, used=used, total=total, others=others, other_processes=processes)


def _nvml_memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    with contextlib.suppress(Exception):
        told = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(told.used), int(told.total)
    return None, None


def _others(nvml: Any, handle: Any, in_use: bool) -> tuple[int | None, int | None]:
    """Bytes and number of the processes on the card that are not this one; None: not known.

    NVML counts processes as the host does. In a container with numbers of its own this process is not found among
    them: they are then one fewer where it uses the card, and which bytes are its own is not known.
    """
    found: dict[int, int | None] = {}
    try:
        for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in ask(handle):
                found[int(process.pid)] = process.usedGpuMemory
    except Exception:
        return None, None
    listed = os.getpid() in found
    found.pop(os.getpid(), None)
    if in_use and found and not listed:
        return (0 if len(found) == 1 else None), len(found) - 1
    sizes = list(found.values())
    return (None if any(size is None for size in sizes) else sum(size or 0 for size in sizes)), len(sizes)
