"""What this machine or container allows a job: shared memory, locked memory, files, memory, huge pages, ptrace."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from mldebug.cluster.health._finding import Finding, Node, bad, fine, gpus, part, size, unseen, warn
from mldebug.cluster.health._rdma import carries_jobs
from mldebug.cluster.health._root import NotVisible, Root

_GIB, _MIB = 1 << 30, 1 << 20
_LOCK, _TRACE = 14, 19  # capabilities: CAP_IPC_LOCK, CAP_SYS_PTRACE
_ROWS = {"memlock": "Max locked memory", "nofile": "Max open files", "nproc": "Max processes"}


def look(root: Root) -> dict[str, Any]:
    """The limits of this process; `ranks` has those of running jobs."""
    found: dict[str, Any] = {"unseen": {}}
    for fact, ask in (
        ("limits", lambda: limits(root, "self")), ("shm", lambda: list(root.space("/dev/shm"))),
        ("status", lambda: _status(root)), ("yama", lambda: root.number("/proc/sys/kernel/yama/ptrace_scope")),
        ("peek", root.peek), ("memory", lambda: _meminfo(root)),
        ("thp", lambda: root.read("/sys/kernel/mm/transparent_hugepage/enabled")),
        ("numa_balancing", lambda: root.number("/proc/sys/kernel/numa_balancing")),
        ("numa_nodes", lambda: _numa_nodes(root)),
    ):  # fmt: skip
        try:
            found[fact] = ask()
        except (NotVisible, ValueError, LookupError) as exc:
            found["unseen"][fact] = str(exc)
    return found


def limits(root: Root, pid: str) -> dict[str, list[int]]:
    """Soft and hard limits of a process, -1 for none."""
    found = {}
    text = root.read(f"/proc/{pid}/limits")
    for name, row in _ROWS.items():
        if match := re.search(rf"^{row}\s+(\S+)\s+(\S+)", text, re.M):
            found[name] = [-1 if one == "unlimited" else int(one) for one in match.groups()]
    return found


def _numa_nodes(root: Root) -> int:
    return sum(bool(re.fullmatch(r"node\d+", one)) for one in root.names("/sys/devices/system/node"))


def _status(root: Root) -> dict[str, int]:
    rows = dict(re.findall(r"^(CapEff|Seccomp):\s*(\S+)", root.read("/proc/self/status"), re.M))
    return {"caps": int(rows.get("CapEff", "0"), 16), "seccomp": int(rows.get("Seccomp", "0"))}


def _meminfo(root: Root) -> dict[str, int]:
    rows = dict(re.findall(r"^(\w+):\s+(\d+)", root.read("/proc/meminfo"), re.M))
    huge = int(rows.get("HugePages_Free", 0)) * int(rows.get("Hugepagesize", 0)) * 1024
    return {"total": int(rows["MemTotal"]) * 1024, "available": int(rows.get("MemAvailable", 0)) * 1024, "huge": huge}


def judge(node: Node) -> Iterator[Finding]:
    """Everything of this file, for one node."""
    seen = part(node, "limits") or {}
    if "why" in seen:
        yield unseen("limits", str(seen["why"]))
        return
    yield from _shm(node, seen)
    yield from _memlock(node, seen)
    yield from _nofile(node, seen)
    yield from _ptrace(node, seen)
    yield from _pages(node, seen)


def _shm(node: Node, seen: Any) -> Iterator[Finding]:
    """NCCL takes some 10 MB of it for each pair and channel, and a DataLoader whole batches."""
    check, hint = "/dev/shm", "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium Memory there"
    if "shm" not in seen:
        why, count = seen.get("unseen", {}).get("shm", "it was not asked for"), len(gpus(node))
        if count and "no such file" in why:
            yield bad(check, "there is none, and NCCL needs it", hint)
        else:
            yield unseen(check, why)
        return
    total, free = seen["shm"]
    count = len(gpus(node))
    if total < 256 * _MIB and count > 1:
        yield bad(
            check, f"{size(total)} for {count} GPUs: NCCL and DataLoader fail with a bus error or no space left", hint
        )
    elif total < _GIB:
        yield warn(check, f"{size(total)}, little for NCCL and the workers of a DataLoader", hint)
    elif free < min(_GIB, total // 20):
        yield warn(
            check, f"{size(free)} of {size(total)} are free", "`ls -la /dev/shm`: remove what ended jobs have left"
        )
    else:
        yield fine(check, f"{size(total)}, {size(free)} free")


def has_rdma(node: Node) -> bool:
    return bool(part(node, "rdma", "ports"))


def _memlock(node: Node, seen: Any) -> Iterator[Finding]:
    """RDMA locks memory; a login shell and the ranks of a job often have different limits, so both are looked at."""
    check = "memlock"
    hint = "`ulimit -l unlimited` where ranks start: LimitMEMLOCK of slurmd or sshd, docker --ulimit memlock=-1"
    own = seen.get("limits", {}).get("memlock")
    if own is None:
        yield unseen(check, seen.get("unseen", {}).get("limits", "not told"))
        return
    rdma, capable = has_rdma(node), bool(seen.get("status", {}).get("caps", 0) >> _LOCK & 1)
    whose = [
        (f"rank {rank['rank']}", f"pid {rank['pid']} has ", -1 if rank["caps"] >> _LOCK & 1 else rank["memlock"])
        for rank in part(node, "ranks", "found") or []
        if "memlock" in rank
    ]
    if not whose:  # no rank runs: one would have what this process has
        whose = [("", "", -1 if capable else own[0])]
    low = [(place, who, soft) for place, who, soft in whose if 0 <= soft < 64 * _GIB]
    for place, who, soft in low[:8] if rdma else []:
        say = bad if soft < _GIB and (carries_jobs(node) or place) else warn
        yield say(check, f"{who}{size(soft)}, and InfiniBand or RoCE is here: ibv_reg_mr fails", hint, place)
    if not (low and rdma):
        held = "unlimited" if own[0] < 0 else f"{size(own[0])} here"
        why = ", and no RDMA device" if not rdma else ", and enough for each rank that runs"
        why = "" if own[0] < 0 else ", and this process may lock more" if capable else why
        yield fine(check, f"{held}{why}")


def _nofile(node: Node, seen: Any) -> Iterator[Finding]:
    check, hint = "open files", "`ulimit -n 65536` where ranks start, or limits.conf; docker: --ulimit nofile=65536"
    own = seen.get("limits", {}).get("nofile")
    if own is None:
        yield unseen(check, seen.get("unseen", {}).get("limits", "not told"))
        return
    soft = own[0]
    if 0 <= soft < 1024 or (0 <= soft < 4096 and (len(gpus(node)) >= 8 or has_rdma(node))):
        yield warn(check, f"up to {soft} in each process: many ranks or DataLoader workers need more", hint)
    else:
        yield fine(check, "no limit" if soft < 0 else f"up to {soft}")


def _ptrace(node: Node, seen: Any) -> Iterator[Finding]:
    """Whether a hang can be looked at: `mldebug spy` and py-spy need ptrace."""
    check = "ptrace"
    capable = bool(seen.get("status", {}).get("caps", 0) >> _TRACE & 1)
    blocked, scope = seen.get("peek"), seen.get("yama", 0)
    if blocked:
        how = "by a seccomp filter" if seen.get("status", {}).get("seccomp") == 2 else "here"
        yield warn(
            check,
            f"forbidden {how} ({blocked}): a hang cannot be looked at",
            "docker: --cap-add SYS_PTRACE; Kubernetes: capabilities.add SYS_PTRACE",
        )
    elif scope == 3:
        yield warn(
            check,
            "forbidden for everybody (yama 3): a hang cannot be looked at",
            "`sysctl kernel.yama.ptrace_scope=1` after a reboot",
        )
    elif scope >= 1 and not capable:
        yield warn(
            check,
            f"only for root (yama {scope}): py-spy cannot look at your ranks",
            "`sysctl kernel.yama.ptrace_scope=0`, or run spy as root",
        )
    elif blocked is None:
        yield unseen(check, seen.get("unseen", {}).get("peek", "not tried"))
    else:
        yield fine(check, "allowed")


def _pages(node: Node, seen: Any) -> Iterator[Finding]:
    memory = seen.get("memory")
    if memory is None:
        yield unseen("memory", seen.get("unseen", {}).get("memory", "not told"))
    elif memory["huge"] > memory["total"] // 4:
        yield warn(
            "huge pages",
            f"{size(memory['huge'])} of {size(memory['total'])} are reserved and not used",
            "`sysctl vm.nr_hugepages=0`, if nothing needs them",
        )
    else:
        thp = re.search(r"\[(\w+)\]", str(seen.get("thp", "")))
        yield fine(
            "huge pages",
            f"transparent ones: {thp.group(1) if thp else 'not told'}; reserved and free: {size(memory['huge'])}",
        )
    if memory is not None and memory["available"] < memory["total"] // 20:
        yield warn(
            "memory",
            f"{size(memory['available'])} of {size(memory['total'])} are available",
            "`ps aux --sort -rss | head`: what holds it?",
        )
    elif memory is not None:
        yield fine("memory", f"{size(memory['available'])} of {size(memory['total'])} are available")
    nodes = seen.get("numa_nodes", 1)
    if seen.get("numa_balancing") and nodes > 1 and gpus(node):
        yield warn(
            "NUMA balancing",
            "on: the kernel moves pages that GPUs and network cards use",
            "`sysctl kernel.numa_balancing=0`",
        )
    elif "numa_balancing" in seen:
        yield fine(
            "NUMA balancing", ("on" if seen["numa_balancing"] else "off") + f", {nodes} NUMA node{'s' * (nodes != 1)}"
        )
    else:
        yield unseen("NUMA balancing", seen.get("unseen", {}).get("numa_balancing", "not told"))


def capabilities(root: Root, pid: str) -> int:
    with contextlib.suppress(NotVisible, ValueError):
        match = re.search(r"^CapEff:\s*(\S+)", root.read(f"/proc/{pid}/status"), re.M)
        return int(match.group(1), 16) if match else 0
    return 0
