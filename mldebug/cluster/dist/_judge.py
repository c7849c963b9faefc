"""judge_dist_test(): which ranks are to blame, from the evidence alone.

The rules go from what cannot be doubted (a process that ended, is stopped, never came) to what follows from the place
where ranks wait. A rank whose trouble is that of another one is not a culprit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mldebug.cluster.dist._agree import Difference, differences
from mldebug.cluster.dist._evidence import Evidence
from mldebug.cluster.dist._odd import odd_settings
from mldebug.cluster.dist._reach import slow_ways, unreachable
from mldebug.cluster.dist._wrong import wrong_contents


_LEAD = 0.05  # seconds: a launcher that ends all ranks at once tells one of them hardly earlier than the next


@dataclass(frozen=True)
class Culprit:
    """Who is to blame. `rank` is None where no single rank is; `fatal` is what makes collectives useless to try."""

    kind: str
    reason: str
    rank: int | None = None
    host: str = ""
    gpu: str = ""
    phase: str = ""
    pid: int | None = None
    hint: str = ""
    stack: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class DistVerdict:
    """`culprits`, the first one first; `differences` between ranks, also those that do no harm; `waiting` ranks."""

    culprits: tuple[Culprit, ...]
    differences: tuple[Difference, ...]
    waiting: tuple[int, ...]
    notes: tuple[str, ...]


def judge_dist_test(evidence: Evidence) -> DistVerdict:
    """Name the ranks that are to blame for what the evidence of a dist-test shows; nothing is run.

    verdict = judge_dist_test(load_evidence("run.json"))
    """
    if evidence["ended"] == "no collector" and "missing_why" in evidence:
        return DistVerdict((_rank_zero(evidence),), (), (), ())
    found = [*_apart(evidence)] or [*_clashes(evidence)]
    found += [*_dead(evidence), *_stopped(evidence), *_silent(evidence)]
    # Where ranks are there twice others are not there at all: that is no trouble of its own.
    found += [] if any(one.kind in ("apart", "clash") for one in found) else _missing(evidence)
    known = {culprit.rank for culprit in found}
    found += [one for one in _duplicates(evidence) if one.rank not in known]
    unlike = differences(evidence)
    found += [
        _of_rank(evidence, rank, "unreachable", why, hint=hint, fatal=True) for rank, why, hint in unreachable(evidence)
    ]
    if not found:
        found += [
            _of_rank(evidence, rank, "slow", why, hint=hint, fatal=True) for rank, why, hint in slow_ways(evidence)
        ]
    found += _errors(evidence, bool(found))
    found += [
        _of_rank(evidence, rank, "wrong contents", why, phase=check) for rank, why, check in wrong_contents(evidence)
    ]
    found += [] if found else _terminated(evidence)
    if not found and evidence["ended"] not in ("", "done", "interrupted"):
        found += _behind(evidence)
    found += _unlike(evidence, unlike)
    blamed = {culprit.rank for culprit in found}
    waiting = [int(name) for name, one in evidence["ranks"].items() if not one["done"] and int(name) not in blamed]
    return DistVerdict(tuple(found), tuple(unlike), tuple(sorted(waiting)), tuple(_notes(evidence)))


def _rank_zero(evidence: Evidence) -> Culprit:
    """All that a rank without a collector can say; who says it is told, as others may see rank 0 very well."""
    rank, one = next(iter(_ranks(evidence)), (0, None))
    if one is not None and evidence["missing_why"].endswith("cannot be resolved here"):
        hint = f"getent hosts NAME on {one['host']}: correct its MASTER_ADDR, /etc/hosts or DNS"
        return _of_rank(evidence, rank, "no collector", evidence["missing_why"], hint=hint)
    hint = "is rank 0 running there, and may this host connect to it? `ss -ltn` there, `nc -vz HOST PORT` here"
    seen = f" (seen by rank {rank} on {one['host']})" if one is not None else ""
    host = evidence.get("plan", {}).get("0", "")
    return Culprit("no collector", evidence["missing_why"] + seen, 0, host, phase="start", hint=hint)


def _of_rank(evidence: Evidence, rank: int | None, kind: str, reason: str, **more: Any) -> Culprit:
    one = evidence["ranks"].get(str(rank))
    if one is None:
        return Culprit(kind, reason, rank, evidence.get("plan", {}).get(str(rank), ""), **more)
    stack = one["stack"] or (one["no_stack"] and f"no stack: {one['no_stack']}")
    stack = stack if kind in ("stopped", "silent", "behind") else ""
    filled = {"phase": one["phase"], "pid": one["pid"], "stack": stack, **more}
    return Culprit(kind, reason, rank, one["host"], gpu_of(one), **filled)


def gpu_of(one: dict[str, Any]) -> str:
    """`cuda:3 GPU-1f0a...`, or "" for a rank without one."""
    device = one["facts"].get("device", {})
    if device.get("index") is None:
        return ""
    uuid = device.get("uuid", "")
    uuid = f"GPU-{uuid}" if uuid and device["kind"] == "cuda" and not uuid.startswith("GPU-") else uuid
    return f"{device['kind']}:{device['index']} {uuid}".strip()


def _apart(evidence: Evidence) -> Iterator[Culprit]:
    """Each node, or each task, is a world of its own: what the launcher started is more than the job knows of."""
    for rank, one in _ranks(evidence):
        if one["apart"]:
            yield _of_rank(evidence, rank, "apart", one["apart"][0], hint=one["apart"][1], fatal=True)
            return


def _clashes(evidence: Evidence) -> Iterator[Culprit]:
    for one in sorted(evidence["clashes"], key=lambda one: int(one["rank"])):
        yield Culprit(
            "clash", one["why"], one["rank"], one["host"], phase="start", pid=one["pid"], fatal=True,
            hint="two nodes have the same node rank, or two jobs the same MASTER_ADDR and MASTER_PORT",
        )  # fmt: skip


def _dead(evidence: Evidence) -> Iterator[Culprit]:
    """Ended by a signal or an exit of its own; one that ended after an error is told by that."""
    for rank, one in _ranks(evidence):
        if one["code"] is None or one["done"] or one["error"] is not None:
            continue
        if one["code"] < 0:
            number = -one["code"]
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            hint = "dmesg | grep -i 'out of memory': the kernel may have ended it" if number == 9 else ""
            crash = number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
            hint = (
                "PYTHONFAULTHANDLER=1 shows its stack; `mldebug doctor` there looks for what is broken"
                if crash
                else hint
            )
            yield _of_rank(evidence, rank, "dead", f"was ended by {name}", hint=hint)
        else:
            yield _of_rank(evidence, rank, "dead", f"left with status {one['code']}")


def _stopped(evidence: Evidence) -> Iterator[Culprit]:
    for rank, one in _ranks(evidence):
        pid = one["parent"] if one["parent_state"] in ("T", "t") else one["pid"] if one["state"] in ("T", "t") else 0
        if pid and one["code"] is None and not one["done"]:
            hint = f"who sent it SIGSTOP? `kill -CONT {pid}` on {one['host']} lets it go on"
            yield _of_rank(evidence, rank, "stopped", "is stopped (SIGSTOP, or a debugger)", pid=pid, hint=hint)


def _silent(evidence: Evidence) -> Iterator[Culprit]:
    """Hosts and processes of which nothing is heard any more, and those whose connection broke."""
    for rank, one in _ranks(evidence):
        if one["done"] or one["parent_state"] in ("T", "t") or one["code"] is not None or one["error"] is not None:
            continue
        if one["terminated"]:  # it said so before it left
            continue
        if one["lost"]:
            reason = f"its connection to the collector ended: {one['lost']}"
            yield _of_rank(evidence, rank, "lost", reason, pid=one["parent"], hint="was it ended from outside?")
        elif one["silent"] > max(3.0, 0.7 * evidence["timeout"]):
            reason = (
                f"nothing was heard from it for {one['silent']:.0f} s: stopped, frozen, or cut off from the network"
            )
            yield _of_rank(
                evidence,
                rank,
                "silent",
                reason,
                pid=one["parent"],
                hint=f"ping {one['host']}; ssh {one['host']} uptime",
            )


def _missing(evidence: Evidence) -> Iterator[Culprit]:
    if evidence["ended"] in ("", "interrupted"):
        return  # they may still come
    planned = _planned_hosts(evidence)
    for rank in range(evidence["world"]):
        if str(rank) not in evidence["ranks"]:
            host = planned.get(rank, "")
            why = evidence["hosts"].get(host) or evidence.get("missing_why") or "never reported to the collector"
            hint = "is its process there? `ps -ef` on its host" + (f", {host}" if host else "")
            hint = f"try it by hand: ssh {host} true" if host in evidence["hosts"] else hint
            if evidence["ended"] == "terminated":
                why = "had not reported when the launcher ended the job"
                hint = "the launcher says which process left first, and with what status; run that one by hand"
            yield Culprit("missing", why, rank, host, phase="start", hint=hint)


def _terminated(evidence: Evidence) -> Iterator[Culprit]:
    """Somebody was told to end, and nobody had failed: one rank, or all of them by a launcher that ends the job."""
    ranks = [(rank, one) for rank, one in _ranks(evidence) if one["terminated"] and not one["done"]]
    if evidence["ended"] == "terminated":
        reason = "the job was ended from outside (SIGTERM)"
        ranks.sort(key=lambda pair: float(pair[1]["terminated"]))
        times = [float(one["terminated"]) for _, one in ranks]
        if times and (len(times) < 2 or times[1] - times[0] > _LEAD):
            reason += f", rank {ranks[0][0]} on {ranks[0][1]['host']} first"
        hint = "the scheduler, somebody's kill, or mpirun, as one of the ranks left: see what it says itself"
        yield Culprit("terminated", reason, hint=hint)
        return
    for rank, one in ranks:
        hint = "who ended it? its launcher, the scheduler, or somebody's kill"
        yield _of_rank(evidence, rank, "dead", "was ended from outside (SIGTERM)", pid=one["parent"], hint=hint)


def _planned_hosts(evidence: Evidence) -> dict[int, str]:
    """Where a rank that never came would be: by the launcher's plan, or beside the other ranks of its node."""
    found: dict[int, str] = {}
    for rank, one in _ranks(evidence):
        first = rank - one["local_rank"]
        for beside in range(max(0, first), min(evidence["world"], first + one["local_world"])):
            found.setdefault(beside, str(one["host"]))
    return found | {int(rank): str(host) for rank, host in evidence.get("plan", {}).items() if rank.isdecimal()}


def _duplicates(evidence: Evidence) -> Iterator[Culprit]:
    """Two ranks on one GPU: by its UUID, which no two GPUs share."""
    first: dict[str, int] = {}
    for rank, one in _ranks(evidence):
        uuid = one["facts"].get("device", {}).get("uuid", "")
        other = first.setdefault(f"{one['boot']} {uuid}", rank) if uuid else rank
        if other != rank:
            where = evidence["ranks"][str(other)]
            same = "" if where["host"] == one["host"] else f" on {where['host']}"
            yield _of_rank(
                evidence, rank, "duplicate", f"uses the same GPU as rank {other}{same}", fatal=True,
                hint="torch.cuda.set_device(LOCAL_RANK) and CUDA_VISIBLE_DEVICES must give each rank its own",
            )  # fmt: skip


# What a rank says whose peer has failed.
_FOLLOWS = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|remote (process|peer)|timed? ?out|socket|"
    r"ncclRemoteError|ncclSystemError|unhandled system error|NCCL communicator was aborted",
    re.I,
)


def _errors(evidence: Evidence, explained: bool) -> list[Culprit]:
    """Exceptions; where there is a first cause already, those that only follow from it are left out."""
    erred = sorted(
        ((rank, one) for rank, one in _ranks(evidence) if one["error"] is not None),
        key=lambda pair: pair[1]["error"]["after"],
    )
    own = [(rank, one) for rank, one in erred if not _FOLLOWS.search(one["error"]["message"])]
    if not own and not explained:
        own = erred
    return [_of_rank(evidence, rank, "error", _error_text(one["error"]), hint=_hint(one)) for rank, one in own]


def _error_text(error: dict[str, Any]) -> str:
    lines = [line.strip() for line in str(error["message"]).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:300] or "no message"
    return f"failed: {text}" if error["type"] == "MldebugError" else f"failed with {error['type']}: {text}"


def _hint(one: dict[str, Any]) -> str:
    text = str(one["error"]["message"])
    if one["phase"] == "import" and one["error"]["type"] in ("ImportError", "ModuleNotFoundError", "OSError"):
        where = f" on {one['host']}"
        return f"`python -c 'import torch'`{where} shows all of it: install torch anew there, or load its libraries"
    for pattern, hint in (
        (r"out of memory", "nvidia-smi: does another process hold the memory?"),
        (r"no space left|/dev/shm", "/dev/shm is too small: docker run --ipc=host, or --shm-size=8g"),
        (r"cannot allocate memory|ibv_", "ulimit -l must be unlimited in the rank itself: see `mldebug doctor`"),
        (r"cuda error|hip error|uncorrectable|ecc", "dmesg | grep -i xid; nvidia-smi -q -d ECC"),
    ):
        if re.search(pattern, text, re.I):
            return hint
    return "run again with NCCL_DEBUG=INFO for what NCCL says" if "nccl" in text.lower() else ""


# A stack that waits for others, in a collective or for the device that runs it.
_WAITS = re.compile(r"distributed_c10d\.py|\b(synchronize|Device\.sync|sync|_send_recv|await_message) \(")


def _behind(evidence: Evidence) -> list[Culprit]:
    """Nobody failed, and nobody gets on: the ranks that are not as far as the others."""
    ranks = [(rank, one) for rank, one in _ranks(evidence) if not one["done"]]
    if not ranks:
        return []
    places = {rank: (one["step"], one["waits"]) for rank, one in ranks}  # who waits for the others is through a phase
    least = min(places.values())
    apart = len(set(places.values())) > 1 or len(ranks) < len(evidence["ranks"])
    last = [(rank, one) for rank, one in ranks if places[rank] == least]
    phase = last[0][1]["phase"]
    # Who has come to the collective waits in it; who hangs on the way to it does something else.
    out = [rank for rank, one in last if one["stack"] and not _WAITS.search(one["stack"])]
    if out and len(last) > 1 and any(_WAITS.search(one["stack"]) for _, one in last):
        return [
            _of_rank(evidence, rank, "behind", f"is not in {phase} itself yet, and others wait for it") for rank in out
        ]
    if apart:
        why = "did not get on for {:.0f} s, and others wait for it"
        return [_of_rank(evidence, rank, "behind", why.format(one["age"])) for rank, one in last]
    if phase in ("start", "import"):  # nobody waits for others there: each has a place of its own to be looked at
        hint = "one that is stuck shows the file it waits for; slow loading is given more time by --start-timeout"
        still = sorted(ranks, key=lambda pair: pair[1]["state"] == "R")  # who computes may only be slow
        reason = "has not loaded torch in {:.0f} s"
        return [_of_rank(evidence, rank, "behind", reason.format(one["age"]), hint=hint) for rank, one in still]
    ages = [one["age"] for _, one in ranks]
    late = [rank for rank, one in ranks if one["age"] < min(ages) + 0.2 and max(ages) - min(ages) > 2.0]
    if late:
        return [
            _of_rank(evidence, rank, "behind", f"came to {phase} {max(ages) - min(ages):.0f} s after the others")
            for rank in late
        ]
    reason = f"all ranks have waited in {phase} for {min(ages):.0f} s, and none is behind the others"
    hint = "`mldebug pairs` tries each pair by itself; NCCL_P2P_DISABLE=1 tells peer access apart"
    return [Culprit("hang", reason, phase=phase, stack=ranks[0][1]["stack"], hint=hint)]


def _unlike(evidence: Evidence, unlike: list[Difference]) -> Iterator[Culprit]:
    for one in unlike:
        if one.level == "bad":
            rank = one.odd[0] if one.odd else None
            more = f" (and {len(one.odd) - 1} more)" if len(one.odd) > 1 else ""
            yield _of_rank(evidence, rank, "differs", one.words + more, phase="facts", hint=one.hint, fatal=one.fatal)


def _notes(evidence: Evidence) -> Iterator[str]:
    yield from odd_settings(evidence)
    for check, why in evidence["left_out"]:
        yield f"left out: {check}: {why}"
    if evidence["ended"] == "interrupted":
        yield "interrupted"


def _ranks(evidence: Evidence) -> list[tuple[int, dict[str, Any]]]:
    return sorted((int(name), one) for name, one in evidence["ranks"].items())
