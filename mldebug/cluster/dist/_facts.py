"""What one rank knows of its host and its libraries, and has to agree on with the others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.cluster.dist._net import backend_address, interfaces
from mldebug.cluster.dist._topology import topology
from mldebug.cluster.dist._wire import listen, resolve

if TYPE_CHECKING:
    from mldebug.cluster.dist._device import Device

_VARIABLES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "CCL_", "HSA_", "NVSHMEM_")
_ALSO = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_CUDA_ALLOC_CONF",
    "MASTER_ADDR",
)
_LIBRARY = re.compile(r"(/\S*/lib[^/\s]*(?:nccl|rccl)[^/\s]*\.so\S*)")


def facts(device: Device) -> dict[str, Any]:
    """Plain values; what cannot be seen is "" or left out."""
    import torch

    mapped = _mapped()
    return {
        "topology": topology(device.facts()["uuid"]) if device.kind == "cuda" else {},
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or torch.version.hip or ""),
        "driver": _driver(device.kind),
        "nccl": _nccl(mapped) if device.kind == "cuda" else "",
        "libraries": mapped,
        "plugins": _plugins(),
        "environment": environment(),
        "nccl_conf": _conf(),
        "kernel": os.uname().release,
        "interfaces": interfaces(),
        "infiniband": _infiniband(),
        "peermem": _peermem(),
        "hostname": _names(),
        "master": resolve(os.environ["MASTER_ADDR"]) if os.environ.get("MASTER_ADDR") else [],
        "shm": _shm(),
        "shm_fault": shm_fault(),
        "memlock": _memlock(),
        "cpus": _cpus(),
        "time": time.time(),
    }


def environment() -> dict[str, str]:
    """The variables that change how ranks talk to each other."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES) or name in _ALSO}


def door(backend: str) -> tuple[socket.socket, list[Any]]:
    """A listening socket on the address that the backend would use, on a port that the kernel gives, and both."""
    address = backend_address(backend)
    try:
        listener = listen(address=address)
    except OSError:  # an address of another host: the others will find nobody there
        listener = listen()
    return listener, [address, listener.getsockname()[1]]


def _mapped() -> list[str]:
    """The NCCL libraries that are loaded, plugins too."""
    with contextlib.suppress(OSError):
        return sorted(set(_LIBRARY.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))))
    return []


def _nccl(mapped: list[str]) -> str:
    """The version that the loaded library itself says, not the one torch was built with."""
    for path in mapped:
        if re.search(r"/lib[nr]ccl\.so", path):
            number = ctypes.c_int()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
                major, rest = divmod(number.value, 10_000)
                return f"{major}.{rest // 100}.{rest % 100}"
    with contextlib.suppress(Exception):  # it is a part of torch's own library
        import torch

        return ".".join(map(str, torch.cuda.nccl.version()[:3]))  # type: ignore[no-untyped-call]
    return ""


def _plugins() -> list[str]:
    """Network and tuner plugins that NCCL would find by itself, by the loader's path and cache."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        cache = Path("/etc/ld.so.cache").read_bytes()
        found |= {one.decode() for one in re.findall(rb"/[\x21-\x7e]*/libnccl-(?:net|tuner)[\x21-\x7e]*", cache)}
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        with contextlib.suppress(OSError):
            found |= {
                str(path) for kind in ("net", "tuner") for path in Path(folder or ".").glob(f"libnccl-{kind}*.so*")
            }
    return sorted(found)[:20]


def _conf() -> list[str]:
    lines: list[str] = []
    for path in (os.environ.get("NCCL_CONF_FILE", ""), "~/.nccl.conf", "/etc/nccl.conf"):
        if path:
            with contextlib.suppress(OSError, RuntimeError):
                text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
                lines += [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return lines[:100]


def _driver(kind: str) -> str:
    path = {"cuda": "/proc/driver/nvidia/version", "xpu": "/sys/module/xe/version"}.get(kind, "")
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace") if path else ""
        match = re.search(r"\b(\d+\.\d+[\d.]*)\b", text)
        return match[1] if match else ""
    with contextlib.suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text(encoding="ascii").strip()
    return ""


def _infiniband() -> list[str]:
    """`mlx5_0/1 ACTIVE 400 Gb/sec InfiniBand`"""
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        words = [f"{port.parent.parent.name}/{port.name}"]
        for name in ("state", "rate", "link_layer"):
            with contextlib.suppress(OSError):
                words.append(
                    (port / name).read_text(encoding="ascii").strip().partition("(")[0].split(": ")[-1].strip()
                )
        found.append(" ".join(words))
    return found


def _peermem() -> str:
    return next((name for name in ("nvidia_peermem", "nv_peer_mem") if Path("/sys/module", name).exists()), "")


def _names() -> dict[str, Any]:
    name = socket.gethostname()
    return {"name": name, "addresses": resolve(name)}


def _shm() -> int:
    with contextlib.suppress(OSError):
        told = os.statvfs("/dev/shm")
        return told.f_bavail * told.f_frsize
    return -1


def shm_fault(folder: str = "/dev/shm") -> str:
    """Why nothing can be put there; "" where it can, and on systems that have no such folder."""
    if sys.platform != "linux":
        return ""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 16)
    except OSError as exc:
        return (exc.strerror or str(exc)).lower()
    return ""


def _memlock() -> int:
    """Bytes; -1 is no limit."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
