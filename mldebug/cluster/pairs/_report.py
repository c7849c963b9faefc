"""PairsReport: the verdict on a pair matrix, and the matrix itself for people, programs and spreadsheets."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mldebug.cluster.pairs._evidence import FAILED, STATUSES, PairsEvidence, is_ping
from mldebug.cluster.pairs._files import save_pairs
from mldebug.cluster.pairs._reference import second_opinion
from mldebug.cluster.pairs._verdict import PairsVerdict
from mldebug.core.hosts import fold_hosts
from mldebug.core.report import Report, jsonable, paint

if TYPE_CHECKING:
    from mldebug.cluster.pairs._grid import Grid

_FINDINGS, _NAMES = 8, 12  # the most that the text tells; to_dict() has all


@dataclass(frozen=True)
class PairsReport(Report):
    """What `pair_matrix()` found: `verdict`, and the `evidence` that it rests on. `ok` where nothing is bad.

    report = pair_matrix("pairs.csv")
    report.verdict.kind, report.verdict.culprits
    """

    verdict: PairsVerdict
    evidence: PairsEvidence

    @property
    def ok(self) -> bool:
        return self.verdict.kind == "none"

    @property
    def headline(self) -> str:
        """The verdict in a few words: `bad: gpu node7:3`."""
        verdict = self.verdict
        if self.ok:
            return "nothing stands out"
        names = list(verdict.culprits)
        if verdict.kind == "several" and all(found.kind == "node" for found in verdict.findings):
            names = [fold_hosts(names)]
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        return f"bad: {verdict.kind}{' ' if names else ''}{', '.join(names[:_NAMES])}{more}"

    @property
    def counts(self) -> dict[str, int]:
        """How many pairs ended in each way; those without any are left out."""
        ends = zip(self.evidence["src"], self.evidence["dst"], self.evidence["status"], strict=True)
        found = Counter(status for src, dst, status in ends if src != dst)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def classes(self) -> dict[str, dict[str, float]]:
        """GBps of the pairs that ended well: lowest, median and highest within nodes, along rails, across rails."""
        import numpy as np

        cells = self._cells
        inside = cells.node[:, None] == cells.node[None, :]
        along = cells.rail[:, None] == cells.rail[None, :]
        found = {}
        for name, mask in (
            ("same node", inside),
            ("other node, same rail", ~inside & along),
            ("other node, other rail", ~inside & ~along),
        ):
            values = np.exp(cells.rate[mask & np.isfinite(cells.rate)])
            if len(values):
                low, middle, high = float(values.min()), float(np.median(values)), float(values.max())
                found[name] = {"lowest": low, "median": middle, "highest": high}
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "ok": self.ok,
            "verdict": jsonable(self.verdict),
            "gpus": len(self.evidence["gpus"]),
            "nodes": len(self._cells.hosts),
            "pairs": self.counts,
            "gbps": self.classes,
            "warnings": second_opinion(self.evidence),
            "notes": list(self.evidence["notes"]),
        }

    def text(self, color: bool = False, width: int = 80) -> str:
        from mldebug.cluster.pairs._heat import heat_lines

        lines = [*self._verdict_lines(width), "", *self._size_lines(width), ""]
        lines += [line[:width] for line in heat_lines(self._cells, *self._distances, width)]
        for note in self.evidence["notes"][:5]:
            lines += textwrap.wrap(f"note: {note}", width, subsequent_indent="  ")
        text = "\n".join(lines)
        return _paint(text) if color else text

    def png(self, path: str | os.PathLike[str]) -> None:
        """Draw the matrix as a PNG: each pair's share of what its siblings reach.

        Raises MldebugError without matplotlib (the extra `plot`) or where `path` cannot be written.

            report.png("pairs.png")
        """
        from mldebug.cluster.pairs._plot import pair_picture

        pair_picture(self._cells, self._distances[0], self.headline, path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the matrix: .csv, .png, or JSON for any other name. `load_pairs` reads CSV and JSON again.

        report.save("pairs.csv")
        """
        if os.fspath(path).lower().endswith(".png"):
            self.png(path)
        else:
            save_pairs(self.evidence, path)

    @cached_property
    def _cells(self) -> Grid:
        from mldebug.cluster.pairs._grid import grid

        return grid(self.evidence)

    @cached_property
    def _distances(self) -> tuple[Any, Any]:
        from mldebug.cluster.pairs._grid import grid
        from mldebug.cluster.pairs._judge import distances
        from mldebug.cluster.pairs._noise import is_noisy, steady
        from mldebug.cluster.pairs._ping_judge import plain

        if is_ping(self.evidence):
            return distances(grid(plain(self.evidence)))
        return distances(grid(steady(self.evidence)) if is_noisy(self.evidence) else self._cells)

    def _verdict_lines(self, width: int) -> list[str]:
        verdict = self.verdict
        lines = textwrap.wrap(self.headline, width, subsequent_indent="  ", break_on_hyphens=False)
        told = [found.reading for found in verdict.findings[:_FINDINGS]] or [verdict.reading]
        for reading in told:
            lines += textwrap.wrap(reading, width, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        if len(verdict.findings) > _FINDINGS:
            lines.append(f"- and {len(verdict.findings) - _FINDINGS} more (--json has all)")
        if verdict.hint:
            lines += textwrap.wrap(f"hint: {verdict.hint}", width, subsequent_indent="  ", break_on_hyphens=False)
        for warning in second_opinion(self.evidence):
            lines += textwrap.wrap(f"warning: {warning}", width, subsequent_indent="  ", break_on_hyphens=False)
        return [*lines, f"sure: {verdict.confidence}"]

    def _size_lines(self, width: int) -> list[str]:
        from mldebug.cluster.pairs._heat import number

        gpus, nodes = len(self.evidence["gpus"]), len(self._cells.hosts)
        what = "host" if is_ping(self.evidence) else "GPU"
        ends = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        line = f"{gpus:,} {what}{'s' if gpus != 1 else ''}"
        line += f"{'' if what == 'host' else f' on {nodes:,} node' + 's' * (nodes != 1)}; pairs: {ends}"
        lines = textwrap.wrap(line, width, subsequent_indent="  ")
        for name, part in self.classes.items():
            low, middle, high = (number(part[key]) for key in ("lowest", "median", "highest"))
            name = "TCP, a single stream" if what == "host" else name
            lines.append(f"  {name:<23} {middle} GBps (lowest {low}, highest {high})")
        if what == "host":
            times = sorted(value for value in self.evidence.get("latency_us", []) if value is not None)
            if times:
                low, middle, high = (f"{times[place]:.0f}" for place in (0, len(times) // 2, -1))
                lines.append(f"  half of a round trip    {middle} us (lowest {low}, highest {high})")
        return lines


def _paint(text: str) -> str:
    """Bad cells and failures in red, besides what every report paints."""
    import re

    painted = paint(text)
    return re.sub(rf"\S+!(?!\S)|\b({'|'.join(FAILED)})\b(?=[,\n])", lambda found: f"\033[31m{found[0]}\033[0m", painted)
