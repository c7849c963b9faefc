"""CPUs and memory that this process may use: affinity beside the locality of the GPUs, and cgroups of both versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster._doctor_finding import (
    Finding,
    Node,
    bad,
    cpu_list,
    cpus,
    fine,
    gpus,
    many,
    part,
    settle,
    size,
    unseen,
    warn,
)
from mldebug.cluster._doctor_gpu import where
from mldebug.cluster._doctor_root import NotVisible, Root

_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number where there is none


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
        found["cgroup"] = _cgroup(root)
    except NotVisible as exc:
        found["unseen"]["cgroup"] = str(exc)
    return found


def allowed(root: Root, pid: str) -> str:
    match = re.search(r"^Cpus_allowed_list:\s*(\S*)", root.read(f"/proc/{pid}/status"), re.M)
    if match is None:
        raise NotVisible(f"/proc/{pid}/status tells no CPUs")
    return match.group(1)


def _cgroup(root: Root) -> dict[str, Any]:
    """The tightest limits on the way from this process' cgroup up: {cpus, memory, used, killed, throttled, version}."""
    places = _places(root)
    if not places:
        raise NotVisible("no cgroup file system is mounted")
    found: dict[str, Any] = {"version": 2 if "unified" in places else 1}
    for kind, folders in places.items():
        for folder in folders:
            _tighten(found, _limits(root, kind, folder))
    return found


def _places(root: Root) -> dict[str, list[str]]:
    """For each controller the folders from this process' cgroup up to where the file system is mounted."""
    mounts: dict[str, tuple[str, str]] = {}  # controller -> root of the mount, mount point
    for line in root.read("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        words, more = fields.split(), rest.split()
        if len(words) < 5 or len(more) < 3:
            continue
        if more[0] == "cgroup2":
            mounts["unified"] = (words[3], words[4])
        elif more[0] == "cgroup":
            for name in set(more[2].split(",")) & {"cpu", "memory"}:
                mounts[name] = (words[3], words[4])
    found: dict[str, list[str]] = {}
    for line in root.read("/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(",") if number != "0" else ["unified"]:
            if name in mounts:
                top, point = mounts[name]
                # Seen from inside a container the path may be that of the host, and the mount its own part already.
                inside = path[len(top) :] if top != "/" and path.startswith(top) else path
                folders = _upwards(point, inside)
                found[name] = [one for one in folders if root.exists(one)] or [point]
    if "unified" in found and not root.exists(f"{mounts['unified'][1]}/cgroup.controllers"):
        del found["unified"]
    if "unified" in found and ("cpu" in found or "memory" in found):
        del found["unified"]  # both are mounted, and the old one has the controllers
    return found


def _upwards(point: str, inside: str) -> list[str]:
    words = [word for word in inside.split("/") if word and word != ".."]
    return ["/".join([point, *words[:count]]) for count in range(len(words), -1, -1)]


def _limits(root: Root, kind: str, folder: str) -> dict[str, float]:
    found: dict[str, float] = {}

    def number(name: str, fact: str) -> None:
        text = root.maybe(f"{folder}/{name}")
        if text is not None and text.lstrip("-").isdecimal() and 0 <= int(text) < _NO_LIMIT:
            found[fact] = int(text)

    if kind == "unified":
        quota = (root.maybe(f"{folder}/cpu.max") or "").split()
        if len(quota) == 2 and quota[0].isdecimal():
            found["cpus"] = int(quota[0]) / max(1, int(quota[1]))
        number("memory.max", "memory")
        number("memory.current", "used")
    elif kind == "cpu":
        text, period = root.maybe(f"{folder}/cpu.cfs_quota_us") or "-1", root.maybe(f"{folder}/cpu.cfs_period_us") or ""
        if text.isdecimal() and period.isdecimal():
            found["cpus"] = int(text) / max(1, int(period))
    else:
        number("memory.limit_in_bytes", "memory")
        number("memory.usage_in_bytes", "used")
    for name in ("memory.events", "memory.oom_control", "cpu.stat"):
        for key, value in re.findall(
            r"^(oom_kill|nr_throttled|nr_periods) (\d+)$", root.maybe(f"{folder}/{name}") or "", re.M
        ):
            found[key] = int(value)
    return found


def _tighten(found: dict[str, Any], here: dict[str, float]) -> None:
    if "cpus" in here and here["cpus"] < found.get("cpus", 1e9):
        found.update({key: here[key] for key in ("cpus", "nr_throttled", "nr_periods") if key in here})
    if "memory" in here and here["memory"] < found.get("memory", _NO_LIMIT):
        found.update({key: here[key] for key in ("memory", "used") if key in here})
    found["oom_kill"] = max(found.get("oom_kill", 0), here.get("oom_kill", 0))


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
