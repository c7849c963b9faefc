"""Verdict: who holds a job up, how, where, and what says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "rank-guarded-collective", "skipped-collective", "extra-collective", "fewer-iterations", "more-iterations",
    "iteration-skew", "rank-local-decision", "dead-main-thread", "missing-rank", "cross-group-order",
    "missing-group-constructor", "p2p-cycle", "two-threads-one-group", "collective-in-destructor",
    "dataloader-worker", "fork-with-lock-held", "fork-after-threads", "pipe-deadlock", "lock-barrier-cycle",
    "gil-held", "process-stopped", "poll-loop", "network", "straggler", "unknown",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What `judge()` says of a job.

    `culprits` are global ranks, empty where no single rank is to blame; `kind` is one of KINDS; `where` has an entry
    for each set of ranks that stand at the same place; `rests_on` names the evidence, strongest first.
    """

    hung: bool
    kind: str
    culprits: tuple[int, ...] = ()
    text: str = ""
    sure: str = "low"  # low, medium, high
    rests_on: tuple[str, ...] = ()
    where: tuple[dict[str, Any], ...] = field(default=())
