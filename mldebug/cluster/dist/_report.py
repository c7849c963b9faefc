"""DistTestReport: what `dist_test` found, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mldebug.cluster.dist._agree import Difference
from mldebug.cluster.dist._evidence import Evidence
from mldebug.cluster.dist._judge import Culprit, DistVerdict, judge_dist_test
from mldebug.core.report import Report


@dataclass(frozen=True)
class DistTestReport(Report):
    """`culprits` has the first one first; `differences` also lists what may be meant; `evidence` is what was seen.

    report = dist_test(nproc=4)
    for culprit in report.culprits:
        print(culprit.rank, culprit.host, culprit.reason)
    """

    culprits: tuple[Culprit, ...]
    differences: tuple[Difference, ...]
    waiting: tuple[int, ...]
    notes: tuple[str, ...]
    world: int
    backend: str
    seconds: float
    ended: str
    evidence: Evidence
    verbose: bool = False

    @property
    def ok(self) -> bool:
        return not self.culprits and self.ended == "done"

    def to_dict(self) -> dict[str, Any]:
        told = super().to_dict()
        del told["verbose"]
        return told

    def text(self, color: bool = False, width: int = 80) -> str:
        from mldebug.cluster.dist._text import text

        return text(self, color)


def make_report(evidence: Evidence, verbose: bool = False) -> DistTestReport:
    """Judge the evidence of a dist-test."""
    return _report(judge_dist_test(evidence), evidence, verbose)


def read_report(told: dict[str, Any], verbose: bool = False) -> DistTestReport:
    """The report that a collector sent as JSON."""
    verdict = DistVerdict(
        tuple(Culprit(**one) for one in told["culprits"]),
        tuple(map(_difference, told["differences"])),
        tuple(told["waiting"]),
        tuple(told["notes"]),
    )  # fmt: skip
    if told["evidence"]:
        return _report(verdict, told["evidence"], verbose)
    # The ranks other than 0 get it without the evidence.
    return DistTestReport(
        verdict.culprits, verdict.differences, verdict.waiting, verdict.notes, told["world"], told["backend"],
        told["seconds"], told["ended"], {}, verbose,
    )  # fmt: skip


def _difference(told: dict[str, Any]) -> Difference:
    values = tuple((value, tuple(ranks)) for value, ranks in told["values"])
    return Difference(**{**told, "values": values, "odd": tuple(told["odd"])})


def _report(verdict: DistVerdict, evidence: Evidence, verbose: bool) -> DistTestReport:
    used = {one["facts"].get("backend") for one in evidence["ranks"].values()} - {None}
    return DistTestReport(
        verdict.culprits, verdict.differences, verdict.waiting, verdict.notes, evidence["world"],
        ", ".join(sorted(used)) or evidence["backend"], evidence["seconds"], evidence["ended"], evidence, verbose,
    )  # fmt: skip
