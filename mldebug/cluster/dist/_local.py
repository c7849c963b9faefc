"""This host, without loading torch: which start of which machine it is, and how many accelerators it has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mldebug.core.errors import UsageError


def devices_here(env: Mapping[str, str] = os.environ) -> int:
    """Those that are visible to this process; 0 where there are none."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            words = [word for word in env[name].split(",") if word.strip()]
            return 0 if words[:1] == ["-1"] else len(words)
    nvidia = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(nvidia) or sum(_is_gpu(path) for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"))


def need_device(backend: str) -> None:
    """UsageError where ranks that are started here could not have this backend."""
    if backend in ("nccl", "rccl") and not devices_here() and not Path("/dev/dxg").exists():  # of Windows' Linux
        raise UsageError(f"{backend} needs an accelerator, and none is seen here", "--backend gloo needs none")


def boot_id() -> str:
    """What tells this machine from all others, and a pid of it from those of other containers; "" where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_gpu(path: Path) -> bool:
    try:
        return path.read_text(encoding="ascii").strip() not in ("", "0")
    except OSError:
        return False
