"""Host memory of this process, and of the cgroup that may end it. Standard library alone."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Host:
    """Bytes. `limit` is the tightest memory limit of the cgroups around this process, and `used` what that one holds;
    None where there is no limit, or where the system does not say."""

    rss: int | None
    peak: int | None  # the largest rss since the process began, or since `reset_peak`
    limit: int | None
    used: int | None


def look_at_host(root: Path = Path("/")) -> Host:
    """What the kernel says of this process: VmRSS and VmHWM of /proc/self/status, and its cgroup's files."""
    rss = peak = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                rss = int(line.split()[1]) << 10
            elif line.startswith("VmHWM:"):
                peak = int(line.split()[1]) << 10
    if rss is None:
        peak = _peak_by_getrusage()
    limit, used = cgroup(root)
    return Host(rss, peak, limit, used)


def anonymous() -> int | None:
    """Bytes of this process that no file is behind: what it has allocated, and not what it has mapped and read. Read
    after each step, and so from the shortest file that has it (man 5 proc: statm)."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            _, resident, shared = file.read().split()[:3]
        return (int(resident) - int(shared)) * _PAGE
    except (OSError, ValueError):
        return None


def reset_peak(root: Path = Path("/")) -> bool:
    """Let `peak` begin anew; what getrusage calls ru_maxrss begins anew with it. False where that is not allowed."""
    try:
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")  # man 5 proc: resets the peak alone
    except OSError:
        return False
    return True


def cgroup(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """The tightest limit on the way from this process's cgroup up to the root, and what is used under it, in bytes.

    Of a container the path in /proc/self/cgroup is often the one that the host sees; what is mounted is then its own
    cgroup at the top of the mount. Page cache counts as used, as it does for the kernel; it is given up first.
    """
    best: tuple[int, int] | None = None
    for folder, limit_name, used_name in _cgroups(root):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            used = int((folder / used_name).read_text(encoding="ascii"))
            # A limit beyond all memory is how version 1 says that there is none.
            if limit < 1 << 60 and (best is None or limit < best[0]):
                best = (limit, used)
    return best if best is not None else (None, None)


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """Folders from the process's own up to the root of each version, with the names of the two files."""
    found: list[tuple[Path, str, str]] = []
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        for mount in ("sys/fs/cgroup/memory",) if controllers else ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
            top = root / mount
            folder = top / path.lstrip("/")
            while top in folder.parents:
                found.append((folder, *names))
                folder = folder.parent
            found.append((top, *names))
    return found


def _peak_by_getrusage() -> int | None:
    """Where there is no /proc: macOS counts in bytes, the others in KiB."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
