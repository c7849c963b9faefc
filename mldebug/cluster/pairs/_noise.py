"""Measurements on CPUs: who else computes decides how fast a pair is, so only strong differences mean something."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.cluster.pairs._tasks import Task

_SUSPICIOUS = 0.6  # of the median of its kind: such a pair is measured again
_SLOW = 0.4  # and so slow it has to be to be judged at all
_MOST = 32  # pairs that are measured again


def is_noisy(evidence: PairsEvidence) -> bool:
    """Whether CPUs carried the messages."""
    return evidence.get("backend") == "gloo"


def suspicious(tasks: Iterable[Task]) -> list[Task]:
    """The slow pairs among those that ended well, slowest first."""
    kinds: dict[bool, list[tuple[float, Task]]] = {}
    for task in tasks:
        if task.status == "ok" and task.gbps and not any(task.wrong.values()):
            inside = task.ends[0].rpartition(":")[0] == task.ends[1].rpartition(":")[0]
            kinds.setdefault(inside, []).append((min(task.gbps.values()), task))
    found = []
    for pairs in kinds.values():
        usual = statistics.median(rate for rate, _ in pairs)
        found += [(rate / usual, task) for rate, task in pairs if rate < _SUSPICIOUS * usual]
    return [task for _, task in sorted(found, key=lambda pair: pair[0])][:_MOST]


def steady(evidence: PairsEvidence) -> PairsEvidence:
    """The same, where all pairs that are not much slower than their kind count as equal: within hosts, and between."""
    hosts = [name.rpartition(":")[0] if ":" in name else name for name in evidence["gpus"]]
    ends = list(zip(evidence["src"], evidence["dst"], strict=True))
    inside = [hosts[src] == hosts[dst] for src, dst in ends]
    usual = {
        kind: statistics.median(known)
        for kind in (True, False)
        if (known := [gbps for gbps, own in zip(evidence["gbps"], inside, strict=True) if gbps and own is kind])
    }
    rates: list[float | None] = []
    for gbps, own, (src, dst) in zip(evidence["gbps"], inside, ends, strict=True):
        fine = gbps is not None and gbps >= _SLOW * usual.get(own, 0.0) > 0
        # The two directions are never quite equal, or they would be taken for one measurement.
        rates.append(usual[own] * (1 + 1e-6 * (src < dst)) if fine else gbps)
    return {**evidence, "gbps": rates}
