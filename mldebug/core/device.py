"""Which accelerator is here (cuda, rocm, xpu, mps, cpu), behind one small interface. Importing this loads no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError, UsageError

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "rocm", "xpu", "mps", "cpu")

# The variables that say which GPUs a process sees; of several that are set each picks from what the next one left.
_VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")}


def find_device(kind: str = "auto", index: int | None = None) -> Device:
    """The accelerator of this process, or the one asked for; the CPU where there is none.

    `kind` is auto or one of cuda, rocm, xpu, mps, cpu. `index` counts the devices that are visible to this process;
    by default it is torch's current one. Loads torch. A kind or an index that is not here is a UsageError.

        device = find_device()
        free, total = device.memory()
    """
    if kind not in ("auto", *KINDS):
        raise UsageError(f"no kind of device is named {kind!r}", f"it is one of auto, {', '.join(KINDS)}")
    here = _kinds_here()
    kind = here[0] if kind == "auto" else kind
    if kind not in here:
        raise UsageError(f"there is no {kind} device here", f"torch sees {', '.join(here)}; {_why_none(kind)}")
    device = Device(kind, 0)
    if kind in ("mps", "cpu"):
        if index:
            raise UsageError(f"there is no {kind} device {index}", f"there is one {kind} device: 0")
        return device
    index = int(device.module.current_device()) if index is None else index
    if not 0 <= index < device.count():
        raise UsageError(
            f"there is no {kind} device {index}: {device.count()} are visible here", f"take 0 to {device.count() - 1}"
        )
    return Device(kind, index)


class Device:
    """One device: `kind`, `index` among the visible ones, and what can be asked of it. Made by `find_device()`."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index

    @property
    def type(self) -> str:
        """What torch calls this kind: a ROCm device is a cuda one."""
        return "cuda" if self.kind == "rocm" else self.kind

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.type) if self.kind in ("mps", "cpu") else torch.device(self.type, self.index)

    @property
    def module(self) -> Any:
        """torch.cuda (also for rocm), torch.xpu, torch.mps or torch.cpu."""
        import torch

        return getattr(torch, self.type)

    def count(self) -> int:
        """How many devices of this kind are visible to this process."""
        return 1 if self.kind in ("mps", "cpu") else int(self.module.device_count())

    @property
    def name(self) -> str:
        """The name of the model, such as "NVIDIA H100 80GB HBM3"."""
        if self.kind == "cpu":
            return _cpu_name()
        if self.kind == "mps":
            return f"Apple {platform.processor() or platform.machine()} GPU"
        return str(self.module.get_device_name(self.index))

    def set_current(self) -> None:
        """Make it the device that `torch.empty(..., device="cuda")` means in this thread."""
        if self.kind not in ("mps", "cpu"):
            self.module.set_device(self.index)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given. Raises what its kernels failed with."""
        if self.kind == "mps":
            self.module.synchronize()
        elif self.kind != "cpu":
            self.module.synchronize(self.index)

    def mark(self) -> Mark:
        """A point in the device's queue, taken now and without waiting; `seconds_between` two of them is time there.

        first = device.mark(); work(); last = device.mark()
        device.synchronize(); print(seconds_between(first, last))
        """
        if self.kind == "cpu":
            return Mark(None, time.perf_counter())
        event = self.module.Event(enable_timing=True) if self.kind != "mps" else self.module.event.Event(True)
        event.record()
        return Mark(event, time.perf_counter())

    def memory(self) -> tuple[int, int]:
        """Bytes that are free and bytes in all: of the device as its driver sees it, or of the host for mps and cpu."""
        if self.kind == "mps":
            limit = int(self.module.recommended_max_memory())
            return max(0, limit - int(self.module.driver_allocated_memory())), limit
        if self.kind == "cpu":
            return host_memory()
        free, total = self.module.mem_get_info(self.index)
        return int(free), int(total)

    def empty_cache(self) -> None:
        """Give memory that torch keeps for later back to the device."""
        if self.kind != "cpu":
            self.module.empty_cache()

    @property
    def uuid(self) -> str:
        """The UUID that NVML and nvidia-smi know the GPU by, "GPU-…" or "MIG-…"; "" where there is none."""
        if self.kind in ("mps", "cpu"):
            return ""
        text = str(getattr(self.module.get_device_properties(self.index), "uuid", ""))
        return text if not text or self.kind != "cuda" or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"

    @property
    def pci(self) -> str:
        """Its address on the PCI bus as sysfs writes it, "0000:3b:00.0"; "" where torch does not say."""
        if self.kind in ("mps", "cpu"):
            return ""
        told = self.module.get_device_properties(self.index)
        if not hasattr(told, "pci_bus_id"):
            return ""
        return f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"

    def nvml(self) -> tuple[Any, Any] | None:
        """The pynvml module and this GPU's handle in it, whatever CUDA_VISIBLE_DEVICES says; None without NVML.

        NVML counts all GPUs of the machine and knows nothing of that variable: the UUID, else the PCI address, says
        which is meant.
        """
        nvml = load_nvml() if self.kind == "cuda" else None
        if nvml is None:
            return None
        with contextlib.suppress(Exception):
            return nvml, nvml.nvmlDeviceGetHandleByUUID(self.uuid)
        with contextlib.suppress(Exception):
            return nvml, nvml.nvmlDeviceGetHandleByPciBusId(self.pci)
        return None

    def physical_index(self) -> int | None:
        """Its number in nvidia-smi and in /dev/nvidia*, whatever CUDA_VISIBLE_DEVICES says; None without NVML."""
        found = self.nvml()
        if found is None:
            return None
        with contextlib.suppress(Exception):
            return int(found[0].nvmlDeviceGetIndex(found[1]))
        return None

    def out_of_memory(self, exc: BaseException) -> bool:
        """Whether this is the device, or the host, saying that there is no memory left."""
        import torch

        known = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
        words = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed")
        return isinstance(exc, (known, MemoryError)) or (
            isinstance(exc, RuntimeError) and any(word in str(exc).lower() for word in words)
        )


@dataclass(frozen=True)
class Mark:
    """A point in a device's queue of work: its event, or the clock where the device has none."""

    event: Any
    clock: float


def seconds_between(first: Mark, last: Mark) -> float:
    """The device's time between two marks. Waits for nothing: the device must have passed both (`synchronize`)."""
    if first.event is None:
        return last.clock - first.clock
    return float(first.event.elapsed_time(last.event)) / 1e3


def load_nvml() -> Any:
    """The pynvml module, initialised, or None where it or the driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no module, no driver, no permission: all mean that NVML tells nothing here
        return None
    return pynvml


def visible_gpus(nvml: Any, env: Mapping[str, str] = os.environ) -> list[Any]:
    """NVML's handles of the GPUs that a CUDA process with this environment sees, in its order. Loads no torch.

    CUDA_VISIBLE_DEVICES holds numbers, or UUIDs that may be cut short, and ends at the first entry that names nothing,
    as for CUDA. Numbers are taken in the order of the PCI bus: CUDA's own order differs only where models are mixed.

        handle = visible_gpus(load_nvml())[local_rank]
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(int(nvml.nvmlDeviceGetCount()))]
    for name in _VISIBLE["cuda"]:
        if name not in env:
            continue
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        handles = _picked(env[name], handles, uuids, nvml)
    return handles


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this host can still give, and has, within the limit of this process's cgroup."""
    free = total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = (line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        sizes = {row[0]: int(row[1]) << 10 for row in rows if len(row) > 1}
        free, total = sizes.get("MemAvailable:", 0), sizes.get("MemTotal:", 0)
    if not total:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            free = total // 2
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            limit = int(Path(limit_file).read_text(encoding="ascii"))
            used = int(Path(used_file).read_text(encoding="ascii"))
            if limit < total:
                free, total = min(free, max(0, limit - used)), limit
    if not total:
        raise MldebugError("this system does not say how much memory it has", "it is read from /proc or sysconf")
    return free, total


def _kinds_here() -> list[str]:
    """The best first; the CPU is always there."""
    import torch

    found = []
    if torch.cuda.is_available():
        found.append("rocm" if torch.version.hip else "cuda")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        found.append("xpu")
    if hasattr(torch.backends, "mps") and torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _why_none(kind: str) -> str:
    """The likely cause, as far as it shows."""
    import torch

    for name in _VISIBLE.get(kind, ()):
        if name in os.environ:
            return f"{name} is {os.environ[name]!r}"
    built = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    if kind in built and not built[kind]:
        return f"torch {torch.__version__} is built without {kind}"
    return "is its driver loaded?"


def _picked(value: str, handles: list[Any], uuids: list[str], nvml: Any) -> list[Any]:
    found: list[Any] = []
    for word in (part.strip() for part in value.split(",")):
        if word.isdecimal():
            match = handles[int(word) : int(word) + 1]
        elif word.startswith("MIG-"):
            match = []
            with contextlib.suppress(Exception):
                match = [nvml.nvmlDeviceGetHandleByUUID(word)]
        else:
            match = [handle for handle, uuid in zip(handles, uuids, strict=True) if word and uuid.startswith(word)]
        if len(match) != 1:
            break
        found += match
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "cpu"
