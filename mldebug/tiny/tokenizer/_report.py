"""What tiny_tokenizer returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.report import Report
from mldebug.tiny._report import Check, holds, layout


@dataclass(frozen=True)
class TinyTokenizerReport(Report):
    """A tiny tokenizer: where it is, its size, the floor of its source, and the checks that it went through.

    `id_map` maps the ids of the source to the new ones; tokens that went have no entry.
    """

    source: str
    path: Path
    kind: str
    source_size: int
    size: int
    floor: int
    floor_why: str = field(repr=False)
    id_map: dict[int, int] = field(repr=False)
    checks: tuple[Check, ...] = field(repr=False)
    dropped: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    files: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return holds(self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; `checks` maps the name of a check to ok and why."""
        document = super().to_dict()
        document["checks"] = {check.name: {"ok": check.ok, "why": check.why} for check in self.checks}
        return document

    def text(self, color: bool = False, width: int = 80) -> str:
        """The report for people: what was made, then one line for each check."""
        rows = [
            ("source", f"{self.source}: {self.kind}, {self.source_size:,} tokens"),
            ("result", f"{self.path}: {self.size:,} tokens"),
            ("floor", f"{self.floor:,} tokens: {self.floor_why}"),
        ]
        if self.dropped:
            rows.append(("dropped", f"{len(self.dropped):,} added tokens that nothing names"))
        rows += [(check.name, f"{_MARKS[check.ok]}  {check.why}") for check in self.checks]
        rows += [("note", note) for note in self.notes]
        rows.append(("time", f"{self.seconds:.1f} s"))
        return layout(rows, width)


_MARKS = {True: "ok", False: "FAILED", None: "-"}
