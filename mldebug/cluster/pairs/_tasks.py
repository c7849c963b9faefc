"""What is measured at a time in a live pair matrix: two GPUs, or all GPUs of two nodes, and how that ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mldebug.cluster.dist._wire import Message
from mldebug.cluster.pairs._evidence import SCHEMA, PairsEvidence
from mldebug.cluster.pairs._schedule import gpu_rounds, node_rounds, sample_rounds


@dataclass
class Task:
    """`gpus` are numbers of GPUs. `status` is "" until it is over."""

    id: int
    gpus: tuple[int, ...]
    ends: tuple[str, str]  # names of the two ends: of GPUs, or of nodes
    nodes: bool = False  # both directions are one measurement
    status: str = ""
    why: str = ""
    round: int = 0
    began: float = 0.0
    trouble: float = 0.0  # when the first sign of a failure came
    gbps: dict[int, float] = field(default_factory=dict)  # by the member that received
    wrong: dict[int, int] = field(default_factory=dict)
    latency: dict[int, float] = field(default_factory=dict)  # by the member that began
    both: list[float] = field(default_factory=list)
    free: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)

    def begin(self, turn: int) -> None:
        self.round, self.began = turn, time.monotonic()

    def take(self, gpu: int, message: Message) -> None:
        kind, member = message["t"], self.gpus.index(gpu)
        if kind in ("part", "measured") and "gbps" in message:
            self.gbps[member], self.wrong[member] = message["gbps"], message["wrong"]
        if kind == "measured" and "latency_us" in message:
            self.latency[member] = message["latency_us"]
            self.both.append(message["both_gbps"])
        elif kind == "free":
            self.free.add(gpu)
        elif kind == "failed":
            self.failed[gpu] = message["why"]
            self.trouble = self.trouble or time.monotonic()

    def end(self, gpu: int, why: str) -> None:
        self.ended[gpu] = why
        self.trouble = self.trouble or time.monotonic()

    def close(self, status: str, turn: int, why: str = "") -> None:
        self.status, self.round, self.why = status, turn, why

    def better(self, other: Task) -> None:
        """Take over what another measurement of the same pair did better."""
        for member, gbps in other.gbps.items():
            self.gbps[member] = max(gbps, self.gbps.get(member, 0.0))
        for member, latency in other.latency.items():
            self.latency[member] = min(latency, self.latency.get(member, latency))
        if len(other.both) == len(self.both):
            self.both = [max(pair) for pair in zip(self.both, other.both, strict=True)]

    def directions(self) -> list[tuple[str, str, float | None, str, float | None]]:
        """(src, dst, gbps, status, latency) of both directions; one that was over before a failure counts."""
        one, other = self.ends
        if self.nodes:
            gbps = min(self.gbps.values(), default=None) if self.status == "ok" else None
            status = "wrong" if self.status == "ok" and any(self.wrong.values()) else self.status
            return [(one, other, gbps, status, None), (other, one, gbps, status, None)]
        found = []
        for src, dst, receiver in ((one, other, 1), (other, one, 0)):
            whole = receiver in self.gbps
            status = ("wrong" if self.wrong[receiver] else "ok") if whole else self.status
            gbps = round(self.gbps[receiver], 6) if whole and status == "ok" else None
            if whole and self.status != "ok" and len(self.gbps) == 2:  # it was the rest that failed
                status, gbps = self.status, None
            found.append((src, dst, gbps, status, self.latency.get(1 - receiver)))
        return found


def tasks_of(names: Sequence[str], hosts: Sequence[Sequence[int]], mode: str, sample: bool) -> list[list[Task]]:
    """The rounds; `hosts` has the numbers of the GPUs of each."""
    turns: list[list[Task]] = []
    number = 0
    if mode == "nodes":
        for nodes in node_rounds(len(hosts)):
            turn = []
            for one, other in nodes:
                ends = (_host(names[hosts[one][0]]), _host(names[hosts[other][0]]))
                turn.append(Task(number := number + 1, (*hosts[one], *hosts[other]), ends, True))
            turns.append(turn)
        return turns
    sizes = [len(host) for host in hosts]
    for places in (sample_rounds if sample else gpu_rounds)(sizes):
        turn = []
        for (node, gpu), (node_2, gpu_2) in places:
            one, other = hosts[node][gpu], hosts[node_2][gpu_2]
            turn.append(Task(number := number + 1, (one, other), (names[one], names[other])))
        turns.append(turn)
    return turns


def evidence_of(
    names: Sequence[str], tasks: Sequence[Task], notes: Sequence[str], blame: list[dict[str, object]]
) -> PairsEvidence:
    """The matrix of what was measured; tasks that never came to an end are left out."""
    number = {name: place for place, name in enumerate(names)}
    found: PairsEvidence = {
        "schema": SCHEMA, "gpus": list(names), "src": [], "dst": [], "gbps": [], "status": [], "notes": list(notes),
        "latency_us": [], "round": [], "both_gbps": [], "blame": blame,
    }  # fmt: skip
    for task in tasks:
        if not task.status:
            continue
        for src, dst, gbps, status, latency in task.directions():
            found["src"].append(number[src])
            found["dst"].append(number[dst])
            found["gbps"].append(gbps)
            found["status"].append(status)
            found["latency_us"].append(latency)
            found["both_gbps"].append(min(task.both) if len(task.both) == 2 and status == "ok" else None)
            found["round"].append(task.round)
    return found


def _host(name: str) -> str:
    return name.rpartition(":")[0]
