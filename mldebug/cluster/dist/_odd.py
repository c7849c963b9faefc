"""Settings of a rank that are odd by themselves, whatever the others have: shown, and no failure of the test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.dist._evidence import Evidence

_SHM = 1 << 30  # bytes: NCCL takes some ten MB for each peer and channel


def odd_settings(evidence: Evidence) -> Iterator[str]:
    """One line for each kind of oddity, with the ranks that have it."""
    found: dict[str, list[int]] = {}
    for name, one in sorted(evidence["ranks"].items(), key=lambda item: int(item[0])):
        for line in _of_rank(one["facts"]):
            found.setdefault(line, []).append(int(name))
    for line, ranks in found.items():
        some = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
        yield f"{'rank' if len(ranks) == 1 else 'ranks'} {some}: {line}"


def _of_rank(facts: dict[str, Any]) -> Iterator[str]:
    fault = facts.get("shm_fault", "")
    if fault:
        yield f"/dev/shm takes no file ({fault}), and NCCL and DataLoader need it: `df /dev/shm`, docker run --ipc=host"
    device = facts.get("device", {})
    if device.get("index") is None:
        return
    cpus, near = set(facts.get("cpus", ())), cpu_list(device.get("local_cpulist", ""))
    if cpus and len(cpus) < 2:
        yield "may use one CPU only: the threads of NCCL and of the loader share it (--cpus-per-task, --cpu-bind=none)"
    elif cpus and near and not cpus & near:
        yield f"may use none of the CPUs next to its GPU (NUMA node {device.get('numa_node', '?')})"
    if not fault and 0 <= facts.get("shm", -1) < _SHM:
        yield f"/dev/shm has {facts['shm'] >> 20} MiB free: docker run --ipc=host, or --shm-size=8g"
    if facts.get("infiniband") and 0 <= facts.get("memlock", -1) < 1 << 34:
        yield f"memlock is limited to {facts['memlock'] >> 10} KiB, and InfiniBand needs it unlimited (ulimit -l)"
    loaded = [path for path in facts.get("libraries", ()) if re.search(r"/lib[nr]ccl\.so", path)]
    if len(loaded) > 1:
        yield f"has {len(loaded)} NCCL libraries loaded: {', '.join(loaded)}"
    for path in facts.get("infiniband", ()):
        if " ACTIVE" not in path and "down" not in path.lower():
            yield f"InfiniBand port {path}"


def cpu_list(text: str) -> set[int]:
    """The numbers in `0-3,8`, as the kernel writes them."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), min(int(last or first), int(first) + 8192) + 1))
    return found
