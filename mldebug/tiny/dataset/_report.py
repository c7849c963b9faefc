"""What tiny_dataset reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.report import Report, jsonable
from mldebug.tiny._report import layout
from mldebug.tiny._sizes import size_text

SHOWN = 5


@dataclass(frozen=True)
class SplitFacts:
    """One split of the result.

    `seen` rows of the source were looked at, all of them if `complete`; `indices` are the rows of the source that were
    taken; `covered` maps what `cover` looked for to the row that has it; `skipped` names rows that cannot be used.
    """

    rows: int
    seen: int
    complete: bool
    bytes: int
    indices: tuple[int, ...] = field(repr=False)
    covered: Mapping[str, int] = field(repr=False)
    skipped: tuple[str, ...] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)

    def line(self) -> str:
        """The split in a line."""
        seen = f"all {self.seen:,} of the source" if self.complete else f"{self.seen:,} that were looked at"
        return f"{self.rows:,} rows, {size_text(self.bytes)}, out of {seen}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        found: dict[str, Any] = jsonable(self)
        return found


@dataclass(frozen=True)
class TinyDatasetReport(Report):
    """A tiny dataset: where it is, what is in it, and what of the source was not seen.

    `splits` maps a name to its SplitFacts; `columns` a name to its type; `bytes` is the size of the folder.
    """

    source: str
    kind: str
    path: Path
    rows: str
    seed: int
    splits: Mapping[str, SplitFacts]
    columns: Mapping[str, str]
    bytes: int
    notes: tuple[str, ...] = field(repr=False)
    seconds: float
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "splits": {name: facts.to_dict() for name, facts in self.splits.items()}}

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [
            ("source", f"{self.source} ({self.kind})"),
            ("dataset", f"{self.path}, {size_text(self.bytes)}, rows: {self.rows}, seed {self.seed}"),
            ("columns", ", ".join(f"{name} {kind}" for name, kind in self.columns.items())),
        ]
        for name, facts in self.splits.items():
            lines.append((name, facts.line()))
            if facts.covered:
                lines.append(("  covers", ", ".join(f"{kind}: {index}" for kind, index in facts.covered.items())))
            lines += [("  skipped", text) for text in facts.skipped[:SHOWN]]
            if facts.skipped[SHOWN:]:
                lines.append(("  skipped", f"and {len(facts.skipped) - SHOWN} more rows"))
            lines += [("  note", text) for text in facts.notes]
        lines += [("note", text) for text in self.notes]
        lines.append(("time", f"{self.seconds:.1f} s{', interrupted' if self.interrupted else ''}"))
        return layout(lines, width)
