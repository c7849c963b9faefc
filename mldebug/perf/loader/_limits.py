"""What this machine gives to workers: CPUs, memory and /dev/shm, within its cgroup, shared with the ranks beside."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mldebug.core.cpus import allowed, cgroup_limits, cpus
from mldebug.core.machine import NotVisible, Root
from mldebug.perf.numa._bind import local_size

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_MOST = 64  # workers, on however large a machine


@dataclass(frozen=True)
class Limits:
    """`cpus` for this rank, and how they come about; free bytes of memory and of /dev/shm (None: not told)."""

    cpus: int
    why: str
    memory: int | None
    shm: int | None

    @property
    def workers(self) -> int:
        """As many as there are CPUs: where workers compute, more have no use."""
        return max(1, min(self.cpus, _MOST))

    @property
    def waiting_workers(self) -> int:
        """The most for workers that wait for storage and do not compute."""
        return max(8, min(4 * self.cpus, _MOST))


def look(root: Root | None = None, environ: Mapping[str, str] = os.environ) -> Limits:
    """The limits of this process, or of a machine made of files."""
    root = root or Root()
    count, why = _cpus(root)
    ranks = local_size(environ) or 1
    if ranks > 1:
        share = max(1, count // ranks)
        # A launcher that binds has divided them already; then few are left, and each rank keeps its own.
        if count >= 2 * ranks:
            count, why = share, f"{why}, shared by {ranks} ranks"
    return Limits(count, why, free_memory(root), free_shm(root))


def _cpus(root: Root) -> tuple[int, str]:
    count, why = os.cpu_count() or 1, "of this machine"
    with contextlib.suppress(NotVisible):
        if found := len(cpus(allowed(root, "self"))):
            count, why = found, "that this process may use"
    with contextlib.suppress(NotVisible):
        quota = cgroup_limits(root).get("cpus")
        if quota is not None and quota < count:
            count, why = max(1, math.ceil(quota)), f"by the cgroup's quota of {quota:g}"
    return count, why


def free_memory(root: Root) -> int | None:
    """Bytes that may still be taken: what the kernel calls available, and what the cgroup has left."""
    found: list[int] = []
    for line in (root.maybe("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(NotVisible):
        group = cgroup_limits(root)
        if "memory" in group:
            found.append(max(0, int(group["memory"] - group.get("used", 0))))
    return min(found) if found else None


def free_shm(root: Root) -> int | None:
    """Free bytes of /dev/shm, through which workers hand tensors over; None where there is none."""
    try:
        seen = os.statvfs(root.path("/dev/shm"))
    except (OSError, AttributeError):
        return None
    return seen.f_bavail * seen.f_frsize


def tensor_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch: what goes through /dev/shm. Other things are pickled into a pipe."""
    if isinstance(batch, Mapping):
        return sum(tensor_bytes(one) for one in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(tensor_bytes(one) for one in batch)
    if callable(getattr(batch, "element_size", None)) and callable(getattr(batch, "numel", None)):
        return int(batch.element_size() * batch.numel())
    return 0


def cpu_seconds(pids: list[int]) -> float:
    """What these processes have computed so far."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


def queued_seconds(pids: list[int]) -> float:
    """For how long these processes have been ready to compute, and had no CPU; 0 where the kernel does not count it."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/schedstat", "rb") as file:
            total += int(file.read().split()[1]) / 1e9
    return total


def memory_of(pids: list[int]) -> int | None:
    """Bytes of these processes, each page that they share counted once over those that share it (PSS)."""
    total, seen = 0, False
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    total, seen = total + int(line.split()[1]) * 1024, True
    return total if seen else None


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    above: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                    above.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    found, ask = [], [pid]
    while ask:
        children = above.get(ask.pop(), [])
        found += children
        ask += children
    return found
