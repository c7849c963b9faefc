"""The GPUs of this machine in the order of CUDA or HIP, and which of them this process sees."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mldebug.core.machine import NotVisible, Root

_PCI = "/sys/bus/pci/devices"
_NVIDIA_PROC = "/proc/driver/nvidia/gpus"
_KFD = "/sys/class/kfd/kfd/topology/nodes"
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, processing accelerator
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_MASKS = {  # in the order in which the libraries apply them: each numbers what the one before left
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index` is its number where nothing is masked; `address` is that of sysfs; `nvml_cpus` what NVML says."""

    index: int
    address: str
    vendor: str = ""
    name: str = ""
    uuid: str = ""
    nvml_cpus: frozenset[int] = frozenset()


def load_nvml() -> Any:
    """The NVML library, ready to be asked, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or a library that does not fit it
        return None
    return pynvml


def list_gpus(root: Root, nvml: Any) -> list[Gpu]:
    """All GPUs that this process may use: by NVML, else by what the drivers leave in /proc and /sys."""
    found = _by_nvml(nvml, _cpu_count(root)) if nvml is not None else []
    return found or _by_nvidia_driver(root) or _by_kfd(root) or all_on_bus(root)


def all_on_bus(root: Root) -> list[Gpu]:
    """The GPUs that sysfs lists, also those that this process may not use, in the order of their addresses."""
    found = []
    with contextlib.suppress(NotVisible):
        for address in root.names(_PCI):
            vendor = _VENDORS.get(root.maybe(f"{_PCI}/{address}/vendor") or "", "")
            if vendor and (root.maybe(f"{_PCI}/{address}/class") or "")[:6] in _CLASSES:
                found.append((address, vendor))
    # A server's own display chip is by neither vendor; of two vendors the one with more GPUs is meant.
    most = max(("nvidia", "amd"), key=lambda vendor: sum(one[1] == vendor for one in found))
    return [Gpu(index, one[0], one[1]) for index, one in enumerate(one for one in found if one[1] == most)]


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str], nvml: Any = None) -> list[Gpu]:
    """The GPUs that the variables leave, in their order: numbers, UUIDs and beginnings of them, and MIG devices.

    As CUDA does, a list is read up to the first word that names no GPU, and one that names a GPU twice leaves none.
    """
    found = list(gpus)
    for name in _MASKS.get(gpus[0].vendor if gpus else "", ()):
        if name == "CUDA_VISIBLE_DEVICES" and gpus[0].vendor == "amd" and "HIP_VISIBLE_DEVICES" in environ:
            continue  # HIP reads the second name only where the first is not set
        if name in environ:
            found = _masked(found, environ[name], nvml)
    return found


def torch_address(index: int) -> str | None:
    """The address of torch's device, where CUDA has been started already: it knows its own order."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return None
        found = torch.cuda.get_device_properties(index)
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except Exception:  # an older torch has no such fields; the device may not be there
        return None


def _masked(gpus: list[Gpu], text: str, nvml: Any) -> list[Gpu]:
    found: list[Gpu] = []
    for word in text.split(","):
        gpu = _named(gpus, word.strip(), nvml)
        if gpu is None:
            break
        if gpu in found and not word.strip().startswith("MIG-"):  # parts of one GPU are not the same
            return []
        found.append(gpu)
    return found


def _named(gpus: list[Gpu], word: str, nvml: Any) -> Gpu | None:
    if number := re.match(r"\+?(\d+)", word):  # what follows a number is not read: "1gpu" is 1
        return gpus[int(number[1])] if int(number[1]) < len(gpus) else None
    if word.startswith("MIG-GPU-"):  # the older form: MIG-GPU-<uuid of the GPU>/<instance>/<instance>
        word = word[len("MIG-") :].partition("/")[0]
    elif word.startswith("MIG-"):
        word = _parent_of_mig(word, nvml)
    fitting = [gpu for gpu in gpus if word and gpu.uuid.lower().startswith(word.lower())]
    return fitting[0] if len(fitting) == 1 else None


def _parent_of_mig(uuid: str, nvml: Any) -> str:
    """The UUID of the GPU that a MIG device is a part of; "" where NVML does not tell."""
    try:
        part = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)))
    except Exception:
        return ""


def _by_nvml(nvml: Any, cpus: int) -> list[Gpu]:
    found = []
    with contextlib.suppress(Exception):  # a driver that fails: the other ways are tried
        for index in range(int(nvml.nvmlDeviceGetCount())):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            address = _sysfs_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
            facts = {"name": "", "uuid": ""}
            for fact, function in (("name", nvml.nvmlDeviceGetName), ("uuid", nvml.nvmlDeviceGetUUID)):
                with contextlib.suppress(Exception):
                    facts[fact] = _text(function(handle))
            near: frozenset[int] = frozenset()
            with contextlib.suppress(Exception):
                words = nvml.nvmlDeviceGetCpuAffinity(handle, -(-cpus // 64))
                near = frozenset(
                    64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1
                )
            found.append(Gpu(index, address, "nvidia", facts["name"], facts["uuid"], near))
    return found


def _by_nvidia_driver(root: Root) -> list[Gpu]:
    """What the driver lists without its library. Those whose device file a cgroup forbids are not counted by CUDA."""
    listed: list[tuple[str, dict[str, str]]] = []
    with contextlib.suppress(NotVisible):
        for address in root.names(_NVIDIA_PROC):
            text = root.maybe(f"{_NVIDIA_PROC}/{address}/information") or ""
            lines = re.findall(r"^(Model|GPU UUID|Device Minor):\s*(.*?)\s*$", text, re.M)
            listed.append((address.lower(), dict(lines)))
    files = {address: f"/dev/nvidia{facts['Device Minor']}" for address, facts in listed if "Device Minor" in facts}
    # A container has the files of its own GPUs. Where there are none at all, the driver makes them when it is asked.
    some = any(map(root.exists, files.values()))
    found: list[Gpu] = []
    for address, facts in listed:
        file = files.get(address, "")
        if not file or not (root.is_forbidden(file) or (some and not root.exists(file))):
            found.append(Gpu(len(found), address, "nvidia", facts.get("Model", ""), facts.get("GPU UUID", "")))
    return found


def _by_kfd(root: Root) -> list[Gpu]:
    """AMD's GPUs in the order of the compute driver. One that is partitioned comes once for each part."""
    found: list[Gpu] = []
    with contextlib.suppress(NotVisible):
        for node in sorted((name for name in root.names(_KFD) if name.isdecimal()), key=int):
            text = root.maybe(f"{_KFD}/{node}/properties") or ""
            facts = {match[1]: int(match[2]) for match in re.finditer(r"^(\w+) (\d+)$", text, re.M)}
            if not facts.get("simd_count"):
                continue  # a CPU
            place = facts.get("location_id", 0) & 0xFFFF  # above these bits is the number of the part
            address = f"{facts.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            uuid = f"GPU-{facts['unique_id']:016x}" if facts.get("unique_id") else ""
            found.append(Gpu(len(found), address, "amd", root.maybe(f"{_KFD}/{node}/name") or "", uuid))
    return found


def _cpu_count(root: Root) -> int:
    """How many CPUs the machine may have, those that are not plugged in as well: the length of NVML's masks."""
    last = re.search(r"(\d+)\s*$", root.maybe("/sys/devices/system/cpu/possible") or "")
    return int(last[1]) + 1 if last else 1024


def _sysfs_address(text: str) -> str:
    """ "00000000:3B:00.0" is "0000:3b:00.0" in sysfs."""
    domain, _, rest = text.strip("\0 ").lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
