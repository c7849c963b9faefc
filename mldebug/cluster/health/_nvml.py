"""What NVML tells of the GPUs of this node, as plain JSON. The library is passed in, so that tests may fake it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from mldebug.core.cpus import cpu_list

# Fact -> the function that tells it and what it takes after the GPU.
_ASKED: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("name", "nvmlDeviceGetName", ()),
    ("uuid", "nvmlDeviceGetUUID", ()),
    ("minor", "nvmlDeviceGetMinorNumber", ()),
    ("vbios", "nvmlDeviceGetVbiosVersion", ()),
    ("virtual", "nvmlDeviceGetVirtualizationMode", ()),
    ("persistence", "nvmlDeviceGetPersistenceMode", ()),
    ("compute_mode", "nvmlDeviceGetComputeMode", ()),
    ("mig", "nvmlDeviceGetMigMode", ()),
    ("ecc_mode", "nvmlDeviceGetEccMode", ()),
    ("ecc_corrected", "nvmlDeviceGetTotalEccErrors", (0, 0)),  # since the driver was loaded
    ("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", (1, 0)),
    ("ecc_uncorrected_ever", "nvmlDeviceGetTotalEccErrors", (1, 1)),
    ("remapped", "nvmlDeviceGetRemappedRows", ()),  # corrected, uncorrected, pending, failed
    ("retired_pending", "nvmlDeviceGetRetiredPagesPendingStatus", ()),
    ("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", ()),
    ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", ()),
    ("pcie_max_gen", "nvmlDeviceGetMaxPcieLinkGeneration", ()),  # of the GPU in this machine
    ("pcie_gpu_gen", "nvmlDeviceGetGpuMaxPcieLinkGeneration", ()),  # of the GPU alone
    ("pcie_max_width", "nvmlDeviceGetMaxPcieLinkWidth", ()),
    ("pcie_replays", "nvmlDeviceGetPcieReplayCounter", ()),
    ("pstate", "nvmlDeviceGetPerformanceState", ()),
    ("sm_clock", "nvmlDeviceGetClockInfo", (1,)),
    ("sm_clock_max", "nvmlDeviceGetMaxClockInfo", (1,)),
    ("mem_clock", "nvmlDeviceGetClockInfo", (2,)),
    ("mem_clock_max", "nvmlDeviceGetMaxClockInfo", (2,)),
    ("temperature", "nvmlDeviceGetTemperature", (0,)),
    ("temperature_slow", "nvmlDeviceGetTemperatureThreshold", (1,)),
    ("power", "nvmlDeviceGetPowerUsage", ()),  # mW
    ("power_limit", "nvmlDeviceGetEnforcedPowerLimit", ()),
    ("power_default", "nvmlDeviceGetPowerManagementDefaultLimit", ()),
)
_FATAL = {15: "the GPU is lost: it has fallen off the bus", 16: "the GPU needs a reset"}
_REASONS = {
    1: "NVML is not initialised",
    3: "this GPU or driver does not support it",
    4: "not permitted: run as root",
    6: "not found",
    9: "the NVIDIA driver is not loaded",
    10: "the driver gave no answer in time",
    12: "libnvidia-ml.so.1 is not installed: no NVIDIA driver, or it was not put into this container",
    13: "the driver is too old for it",
    15: _FATAL[15],
    16: _FATAL[16],
    17: "the operating system or a cgroup forbids it",
    18: "the driver in the kernel and libnvidia-ml.so have different versions",
    25: "the driver is too old for it",
}
INVALID, NOT_SUPPORTED = 2, 3
HANGS = -1  # in the place of an error: there was no answer at all
_LINK_COUNTERS = ("replay", "recovery", "crc flit", "crc data", "ecc data")  # by number, as NVML counts them
_LINK_FIELDS = {  # for Hopper, and then for NVLink 5
    "replay": "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY",
    "recovery": "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY",
    "crc": "NVML_FI_DEV_NVLINK_ERROR_DL_CRC",
    "receive errors": "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    "link integrity": "NVML_FI_DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS",
    "failed recovery": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
}
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by the type of a field's value


def load_nvml() -> tuple[Any, dict[str, Any]]:
    """The NVML library, ready to be asked, or None and why not."""
    try:
        import pynvml
    except ImportError:
        return None, {"why": "nvidia-ml-py is not installed", "error": 0}
    try:
        pynvml.nvmlInit()
    except Exception as exc:
        return None, {"why": reason(exc), "error": int(getattr(exc, "value", 0))}
    return pynvml, {}


def look(nvml: Any, cpus: int = 64) -> dict[str, Any]:
    """All GPUs that NVML shows; `cpus` is how many CPUs the machine may have."""
    seen = _Asking(nvml)
    seen.ask("driver", "nvmlSystemGetDriverVersion")
    seen.ask("cuda", "nvmlSystemGetCudaDriverVersion")
    found: list[dict[str, Any]] = []
    handles: dict[int, Any] = {}
    for index in range(int(nvml.nvmlDeviceGetCount())):
        gpu: dict[str, Any] = {"index": index, "unseen": {}}
        found.append(gpu)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as exc:
            gpu["fatal"] = reason(exc)
            continue
        handles[index] = handle
        gpu.update(_gpu(_Asking(nvml, handle, gpu["unseen"]), cpus))
        lost = [why for why in gpu["unseen"].values() if why in _FATAL.values()]
        if lost:
            gpu["fatal"] = lost[0]
    peers = _peers(nvml, {index: handles[index] for index in handles if "fatal" not in found[index]})
    return {**seen.facts, "unseen": seen.unseen, "gpus": found, "peers": peers}


def sample(nvml: Any, handle: Any) -> dict[str, Any]:
    """What changes with the load of a GPU."""
    asking = _Asking(nvml, handle)
    names = ("pcie_gen", "pcie_width", "sm_clock", "temperature", "power")
    for fact, function, more in _ASKED:
        if fact in names:
            asking.ask(fact, function, *more)
    asking.ask("throttle", _throttle_function(nvml))
    return asking.facts


def handles_by_uuid(nvml: Any) -> dict[str, Any]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {_plain(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}


def reason(exc: BaseException) -> str:
    """Why NVML gave no answer."""
    code = getattr(exc, "value", None)
    if code in _REASONS:
        return _REASONS[code]
    return f"NVML says: {str(exc).lower()}" if code is not None else f"{type(exc).__name__}: {str(exc)[:100]}"


class _Asking:
    """Asks one GPU, or the library, fact by fact; what it does not tell goes to `unseen` with the reason."""

    def __init__(self, nvml: Any, handle: Any = None, unseen: dict[str, str] | None = None) -> None:
        self.nvml = nvml
        self.first: tuple[Any, ...] = () if handle is None else (handle,)
        self.facts: dict[str, Any] = {}
        self.unseen = {} if unseen is None else unseen

    def ask(self, fact: str, function: str, *more: Any) -> None:
        call = getattr(self.nvml, function, None)
        if call is None:
            self.unseen[fact] = f"this nvidia-ml-py has no {function}"
            return
        try:
            self.facts[fact] = _plain(call(*self.first, *more))
        except Exception as exc:
            self.unseen[fact] = reason(exc)


def _gpu(asking: _Asking, cpus: int) -> dict[str, Any]:
    for fact, function, more in _ASKED:
        asking.ask(fact, function, *more)
    asking.ask("throttle", _throttle_function(asking.nvml))
    asking.ask("affinity", "nvmlDeviceGetCpuAffinity", max(1, -(-cpus // 64)))
    if "affinity" in asking.facts:
        words = asking.facts["affinity"]
        asking.facts["affinity"] = cpu_list(
            64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1
        )
    handle, nvml = asking.first[0], asking.nvml
    for fact, look_at in (
        ("bus", _bus), ("memory", _memory), ("rows", _rows), ("processes", _processes), ("fabric", _fabric),
        ("c2c", _c2c),
    ):  # fmt: skip
        try:
            asking.facts[fact] = look_at(nvml, handle)
        except Exception as exc:
            asking.unseen[fact] = reason(exc)
    _links(asking, handle)
    return asking.facts


def _throttle_function(nvml: Any) -> str:
    new = "nvmlDeviceGetCurrentClocksEventReasons"
    return new if hasattr(nvml, new) else "nvmlDeviceGetCurrentClocksThrottleReasons"


def bus(text: str) -> str:
    """An address on the PCI bus as sysfs writes it: "00000000:3B:00.0" is "0000:3b:00.0"."""
    domain, _, rest = text.strip("\0 ").lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _bus(nvml: Any, handle: Any) -> str:
    return bus(_plain(nvml.nvmlDeviceGetPciInfo(handle).busId))


def _memory(nvml: Any, handle: Any) -> dict[str, int]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"total": int(memory.total), "used": int(memory.used)}


def _rows(nvml: Any, handle: Any) -> dict[str, int]:
    """Banks of memory by how many spare rows are left in them."""
    rows = nvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {name: int(getattr(rows, name)) for name in ("max", "high", "partial", "low", "none")}


def _processes(nvml: Any, handle: Any) -> list[list[int]]:
    """Processes that compute on it, and the bytes each holds (0: not told)."""
    return [[int(one.pid), int(one.usedGpuMemory or 0)] for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def _fabric(nvml: Any, handle: Any) -> dict[str, int]:
    """The state of an NVSwitch fabric as this GPU sees it."""
    last: Exception | None = None
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfoV_t"):
        if not hasattr(nvml, name):
            continue
        info = getattr(nvml, name)()
        try:
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except Exception as exc:
            last = exc
            continue
        return {"state": int(info.state), "status": int(info.status), "health": int(info.healthMask)}
    raise last or AttributeError("this nvidia-ml-py has no nvmlDeviceGetGpuFabricInfoV")


def _c2c(nvml: Any, handle: Any) -> int:
    """1 where the GPU is joined to its CPU by NVLink-C2C, as in a Grace Hopper: PCIe is idle then."""
    return int(nvml.nvmlDeviceGetC2cModeInfoV1(handle).isC2cEnabled)


def _links(asking: _Asking, handle: Any) -> None:
    """NVLink: 1 for a link that is active, 0 for one that is not, and the error counters of the active ones."""
    nvml = asking.nvml
    states: list[int] = []
    for link in range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            states.append(int(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except Exception as exc:
            code = getattr(exc, "value", None)
            if link == 0:
                asking.unseen["links"] = reason(exc)
                return
            if code == INVALID:  # this was the last one
                break
            if code != NOT_SUPPORTED:
                asking.unseen["links"] = reason(exc)
                return
            states.append(0)
    while len(states) > 1 and states[-1] == 0 and len(states) > 18:  # numbers that this GPU does not have
        states.pop()
    asking.facts["links"] = states
    active = [link for link, state in enumerate(states) if state]
    asking.facts["link_errors"] = _link_fields(nvml, handle, active) or _link_counters(nvml, handle, active)


def _link_fields(nvml: Any, handle: Any, links: Sequence[int]) -> dict[str, int]:
    wanted = [
        (link, counter, getattr(nvml, name)) for link in links for counter, name in _LINK_FIELDS.items()
        if hasattr(nvml, name)
    ]  # fmt: skip
    if not wanted:
        return {}
    found = {}
    try:
        values = nvml.nvmlDeviceGetFieldValues(handle, [(field, link) for link, _, field in wanted])
        for (link, counter, _), one in zip(wanted, values, strict=True):
            if one.nvmlReturn == 0 and 0 <= one.valueType < len(_VALUES):
                found[f"link {link} {counter}"] = int(getattr(one.value, _VALUES[one.valueType]))
    except Exception:  # an older driver: it has the counters
        return {}
    return found


def _link_counters(nvml: Any, handle: Any, links: Sequence[int]) -> dict[str, int]:
    found = {}
    for link in links:
        for number, counter in enumerate(_LINK_COUNTERS):
            try:
                found[f"link {link} {counter}"] = int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number))
            except Exception:  # not every generation has each of them
                continue
    return found


def _peers(nvml: Any, handles: dict[int, Any]) -> list[list[int | None]]:
    """For each pair of GPUs: peer access over any path, over NVLink, and how far apart they are on the PCI bus."""
    rows: list[list[int | None]] = []
    numbers = sorted(handles)
    for place, one in enumerate(numbers):
        for other in numbers[place + 1 :]:
            asking = _Asking(nvml)
            pair = (handles[one], handles[other])
            asking.ask("any", "nvmlDeviceGetP2PStatus", *pair, 1)  # NVML_P2P_CAPS_INDEX_WRITE
            asking.ask("nvlink", "nvmlDeviceGetP2PStatus", *pair, 2)  # NVML_P2P_CAPS_INDEX_NVLINK
            asking.ask("apart", "nvmlDeviceGetTopologyCommonAncestor", *pair)
            rows.append([one, other, *(asking.facts.get(fact) for fact in ("any", "nvlink", "apart"))])
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (str, int)):
        return value
    # An array of ctypes first: int() would take it for the text of a number.
    return [int(one) for one in value] if hasattr(value, "__len__") else int(value)
