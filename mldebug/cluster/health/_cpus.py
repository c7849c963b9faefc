"""CPUs and memory that this process may use: affinity beside the locality of the GPUs, and cgroups of both versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import (
    Finding,
    Node,
    bad,
    fine,
    gpus,
    many,
    part,
    settle,
    size,
    unseen,
    warn,
)
from mldebug.cluster.health._gpu import where
from mldebug.cluster.health._root import NotVisible, Root
from mldebug.core.cpus import allowed, cgroup_limits, cpu_list, cpus


def look(root: Root) -> dict[str, Any]:
    """Allowed CPUs, how many there are, and the limits of the cgroups above this process."""
    found: dict[str, Any] = {"unseen": {}}
    try:
        found["allowed"] = allowed(root, "self")
    except NotVisible as exc:
        found["unseen"]["allowed"] = str(exc)
    for fact in ("possible", "online"):
        text = root.maybe(f"/sys/devices/system/cpu/{fact}")
        if text is not None:
            found[fact] = text
    try:
        found["cgroup"] = cgroup_limits(root)
    except NotVisible as exc:
        found["unseen"]["cgroup"] = str(exc)
    return found


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    seen = part(node, "cpus") or {}
    if "why" in seen:
        yield unseen("CPUs", str(seen["why"]))
        return
    yield from _count(node, seen)
    yield from _near(node, seen)
    yield from _group(node, seen)
    yield from _ranks(node)


def _count(node: Node, seen: Any) -> Iterator[Finding]:
    check = "CPUs"
    if "allowed" not in seen:
        yield unseen(check, seen.get("unseen", {}).get("allowed", "not told"))
        return
    mine, count = cpus(seen["allowed"]), len(gpus(node))
    hint = "SLURM: --cpus-per-task; docker: --cpuset-cpus; `taskset -p PID` shows who binds it"
    if count and len(mine) < 2 * count:
        yield warn(check, f"{len(mine)} for {many(count, 'GPU')} ({seen['allowed']}): each rank needs 2 at least", hint)
    else:
        yield fine(check, f"{len(mine)} of {len(cpus(seen.get('online', '')) or mine)}")


def _near(node: Node, seen: Any) -> Iterator[Finding]:
    """CPUs beside each GPU. NVML's own list is empty in a cpuset that leaves them out, and setting it fails then."""
    check = "CPU affinity"
    devices = {one["address"]: one for one in part(node, "pci", "devices") or []}
    mine = cpus(seen.get("allowed", ""))
    found = gpus(node)
    if not found or not mine:
        return
    troubles, known = [], 0
    for gpu in found:
        device = devices.get(gpu.get("bus"), {})
        near = cpus(device.get("cpus", ""))
        if not near and gpu.get("affinity"):
            near = cpus(gpu["affinity"])
        if not near and gpu.get("affinity") == "":
            troubles.append(
                warn(check, "NVML's list of its CPUs is empty: nvmlDeviceSetCpuAffinity fails here", _BIND, where(gpu))
            )
            continue
        if not near:
            continue
        known += 1
        if not near & mine:
            says = (
                f"none of its CPUs ({cpu_list(near)}) may be used here ({seen['allowed']}): all traffic crosses sockets"
            )
            if gpu.get("affinity") == "":
                says += "; NVML's list is empty, so nvmlDeviceSetCpuAffinity fails"
            troubles.append(warn(check, says, _BIND, where(gpu)))
    if not known and not troubles:
        virtual = part(node, "pci", "virtual")
        why = f"{virtual} hides which CPUs are near" if virtual else "sysfs does not tell it"
        yield unseen(check, why, "NCCL_TOPO_FILE=FILE of your cloud tells NCCL, where there is one" if virtual else "")
        return
    yield from settle(check, troubles, f"CPUs near {many(known, 'GPU')} may be used")


_BIND = "give the job CPUs of all sockets: SLURM --gpu-bind and --cpus-per-task, docker --cpuset-cpus"


def _group(node: Node, seen: Any) -> Iterator[Finding]:
    check, group, count = "cgroup", seen.get("cgroup"), len(gpus(node))
    if group is None:
        yield unseen(check, seen.get("unseen", {}).get("cgroup", "not told"))
        return
    troubles = []
    if "cpus" in group and count and group["cpus"] < 2 * count:
        say = bad if group["cpus"] < count else warn
        troubles.append(
            say(
                check,
                f"a quota of {group['cpus']:g} CPUs for {many(count, 'GPU')}",
                "raise --cpus, or the CPU limit of the pod",
            )
        )
    if "memory" in group and group.get("used", 0) > 0.95 * group["memory"]:
        says = f"{size(group['used'])} of {size(group['memory'])} are used (files in memory count too)"
        troubles.append(warn(check, says, "raise the memory limit; what is killed for memory dies with signal 9"))
    if group.get("oom_kill"):
        says = f"{group['oom_kill']:.0f} processes were killed for memory here"
        troubles.append(warn(check, says, "raise the memory limit, or use fewer DataLoader workers"))
    if group.get("nr_throttled", 0) > 0.2 * max(1, group.get("nr_periods", 0)) and group.get("nr_periods", 0) > 100:
        troubles.append(warn(check, "its CPU quota holds it back often", "raise --cpus, or the CPU limit of the pod"))
    cpu = f"{group['cpus']:g} CPUs" if "cpus" in group else "no CPU limit"
    memory = f"{size(group['memory'])} of memory" if "memory" in group else "no memory limit"
    yield from settle(check, troubles, f"{cpu}, {memory} (version {group['version']})")


def _ranks(node: Node) -> Iterator[Finding]:
    """Ranks that run and share too few CPUs."""
    found = [rank for rank in part(node, "ranks", "found") or [] if rank.get("cpus")]
    shared: dict[str, list[str]] = {}
    for rank in found:
        shared.setdefault(rank["cpus"], []).append(str(rank["rank"]))
    for allowed_, ranks in shared.items():
        count = len(cpus(allowed_))
        if count < 2 * len(ranks) and count < 2 * len(found):
            share = f"{count} CPU{'s' * (count != 1)} ({allowed_})"
            says = f"{len(ranks)} running ranks ({', '.join(ranks[:8])}) share {share}"
            yield warn(
                "CPUs", says, "SLURM: --cpus-per-task; mpirun: --bind-to none; torchrun inherits what its shell has"
            )
