"""CommsReport: what a run of the benchmark found, in the columns of nccl-tests."""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass
from typing import Any

from mldebug.cluster.collectives._judge import best_cell, expectations, slow_ranks
from mldebug.cluster.collectives._table import size_text
from mldebug.core.report import Report, jsonable, paint


@dataclass(frozen=True)
class CommsReport(Report):
    """`rows` are the measurements; `ok` is False where contents were wrong, the run ended early, busbw is below
    what `min_busbw` asked for, or the file that was asked for could not be written.

        report = comms(["all_reduce"], last="1G")
        report.best("all_reduce")  # GBps
    """

    evidence: dict[str, Any]
    slow: list[dict[str, Any]]
    expected: list[dict[str, Any]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.evidence["rows"])

    @property
    def wrong(self) -> int:
        """Elements that came out wrong, of all ranks and checks."""
        return sum(cell["wrong"] or 0 for _, cell in self._cells())

    @property
    def too_slow(self) -> list[str]:
        """The collectives whose best busbw is below what was asked for."""
        least = self.evidence["asked"].get("min_busbw", 0.0)
        names = dict.fromkeys(row["collective"] for row in self.rows)
        return [name for name in names if self.best(name) < least]

    @property
    def ok(self) -> bool:
        told = self.evidence
        fine = not (self.wrong or self.too_slow or told.get("unsaved"))
        return told["ended"] == "finished" and fine and self._measured()

    def best(self, collective: str = "all_reduce") -> float:
        """The highest busbw of a collective in GBps; 0 where it was not measured."""
        found = best_cell(self.rows, collective)
        return float(found[1]["busbw"]) if found else 0.0

    def to_dict(self) -> dict[str, Any]:
        judged = {"slow": self.slow, "expected": self.expected, "wrong": self.wrong}
        evidence = dict(self.evidence)
        return dict(jsonable({"schema": self.schema, "ok": self.ok, **evidence, **judged, "too_slow": self.too_slow}))

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [*_wrapped(self._answer(), width)]
        if self.evidence["objects"]:
            lines += ["", *self._objects()]
        for title, rows in self._tables():
            lines += ["", f"# {title}", *_table(rows, width)]
        if self.evidence["stability"]:
            lines += ["", *_stability(self.evidence["stability"], width)]
        if self.rows:
            busbw = statistics.fmean(cell["busbw"] for _, cell in self._cells())
            lines += ["", f"# Out of bounds values : {self.wrong} {'FAILED' if self.wrong else 'OK'}"]
            lines += [f"# Avg bus bandwidth    : {busbw:g}"]
        for line in self._remarks():
            lines += _wrapped(line, width)
        text = "\n".join(lines) + "\n"
        return paint(text) if color else text

    def plot_text(self, width: int = 60) -> str:
        """busbw by size, as bars of signs."""
        lines = []
        for title, rows in self._tables():
            values = [max(row[place]["busbw"] for place in _PLACES if place in row) for row in rows]
            most = max(values, default=0.0) or 1.0
            lines.append(title)
            for row, value in zip(rows, values, strict=True):
                lines.append(f"{size_text(row['bytes']):>10} {'#' * round(value / most * width):<{width}} {value:.4g}")
        return "\n".join(lines)

    # The parts of the text

    def _measured(self) -> bool:
        return bool(self.rows or self.evidence["objects"])

    def _cells(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(row, row[place]) for row in self.rows for place in _PLACES if place in row]

    def _answer(self) -> str:
        told = self.evidence
        who = f"{told['world']} x {told['gpu'] or 'rank'}" if told["world"] else ""
        if len(told["hosts"]) > 1:
            who += f" on {len(told['hosts'])} hosts"
        parts = []
        for name in dict.fromkeys(row["collective"] for row in self.rows):
            found = best_cell(self.rows, name)
            if found is not None:
                row, cell = found
                parts.append(f"{name} {cell['busbw']:.4g} GBps busbw at {size_text(row['bytes'])}")
        said = "; ".join(parts) or ("objects against tensors" if told["objects"] else "nothing was measured")
        if self.wrong:
            said = f"{self.wrong} WRONG values; {said}"
        if told["ended"] != "finished":
            said = f"ended early ({told['ended']}): {told['why']}; {said}"
        versions = f"{told['backend']} {told['nccl']}".strip()
        about = ", ".join(filter(None, [who, versions]))
        return f"comms: {said} ({about + '; ' if about else ''}{told['seconds']:.1f} s)"

    def _tables(self) -> list[tuple[str, list[dict[str, Any]]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            more = [f"root {row['root']}"] if row["root"] >= 0 else []
            op = [row["op"]] if row["op"] != "none" else []
            found.setdefault(" ".join([row["collective"], row["dtype"], *op, *more]), []).append(row)
        return list(found.items())

    def _objects(self) -> list[str]:
        told = self.evidence["objects"]
        means = {name: statistics.fmean(values) for name, values in told["us"].items()}
        least = min(means.values())
        lines = [
            f"# one number told to all ranks, {told['iters']} calls",
            f"{'':<18} {'us a call':>10} {'of the fastest':>15}",
        ]
        return lines + [f"{name:<18} {mean:>10.1f} {mean / least:>14.1f}x" for name, mean in means.items()]

    def _remarks(self) -> list[str]:
        told = self.evidence
        lines = [f"note: {note}" for note in told["notes"]]
        if told.get("unsaved"):
            lines.append(f"FAILED: {told['unsaved']}")
        for bad in self.slow:
            lines.append(f"slow: rank {bad['rank']} on {bad['host']} {bad['why']} (robust z {bad['z']:g})")
        chosen = _chosen(self.rows)
        if chosen:
            lines.append(f"NCCL chose: {chosen}")
        ways: dict[str, int] = {}
        for rank in told["ranks"]:
            for way, peers in rank.get("routes", {}).items():
                ways[way] = ways.get(way, 0) + len(peers)
        if ways:
            lines.append("transport: " + ", ".join(f"{way} ({count} pairs)" for way, count in sorted(ways.items())))
        for one in self.expected:
            where = f"{one['platform']}{': ' + one['notes'] if one['notes'] else ''} ({one['source']})"
            lines.append(
                f"expected: {one['collective']} {one['expected']:.4g} GBps on {where}; here {100 * one['share']:.0f}%"
            )
        for name in self.too_slow:
            least = told["asked"]["min_busbw"]
            lines.append(f"FAILED: {name} reaches {self.best(name):.4g} GBps busbw, and {least:g} were asked for")
        if hint := self._hint():
            lines.append(f"hint: {hint}")
        return lines

    def _hint(self) -> str:
        ended = self.evidence["ended"]
        if ended == "memory":
            return "a smaller -e; `nvidia-smi` shows what else is on the card"
        if ended == "error" and not self.evidence["culprits"]:
            return "`mldebug comms --help` lists what it takes"
        if ended in ("hang", "dead", "start", "error"):
            return "`mldebug dist-test` tests each rank and names who is to blame"
        if self.wrong:
            return "`mldebug pairs` names the link or the GPU that corrupts"
        if self.too_slow or any(one["low"] for one in self.expected):
            return "`mldebug pairs` finds the slow link, `mldebug doctor` the setting"
        return ""


_PLACES = ("out_of_place", "in_place")


def judged(evidence: dict[str, Any]) -> CommsReport:
    """The report on what a run left, also one that was read from a file."""
    # CPUs have more to do than this, and their ranks share the memory that they copy.
    if evidence["backend"] == "gloo":
        slow = slow_ranks(evidence["ranks"], 1000.0, shared_memory=True)
    else:
        slow = slow_ranks(evidence["ranks"])
    return CommsReport(evidence, slow, expectations(evidence))


def _table(rows: list[dict[str, Any]], width: int) -> list[str]:
    """The columns of nccl-tests where the width allows, else without those that are the same in all rows."""
    wide = width >= 118
    head = (
        f"{'size':>12}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}" if wide else f"{'size':>9} {'mode':>7}"
    )
    cell = "  {:>7}  {:>6}  {:>6}  {:>6}" if wide else " {:>8} {:>7} {:>7} {:>5}"
    units = ("us", "GBps", "GBps", "") if not wide else ("(us)", "(GB/s)", "(GB/s)", "")
    blank = " " * len(head)
    side = len(cell.format("", "", "", ""))
    places = [place for place in _PLACES if any(place in row for row in rows)]
    lines = [
        blank + "".join(f"{place.replace('_', '-'):>{side}}" for place in places),
        head + cell.format("time", "algbw", "busbw", "#wrong" if wide else "wrong") * len(places),
        blank + cell.format(*units) * len(places),
    ]
    for row in rows:
        modes = list(dict.fromkeys(row[place]["mode"] for place in places if place in row))
        start = f"{size_text(row['bytes']):>9} {'/'.join(modes):>7}"
        if wide:
            start = f"{row['bytes']:>12}  {row['count']:>12}  {row['dtype']:>8}  {row['op']:>6}  {row['root']:>6}"
        lines.append(
            start + "".join(_cell(row.get(place), cell) for place in places) + (f"  {'/'.join(modes)}" if wide else "")
        )
    return lines


def _cell(cell: dict[str, Any] | None, form: str) -> str:
    if cell is None:
        return form.format("N/A", "N/A", "N/A", "N/A")
    wrong = "N/A" if cell["wrong"] is None else f"{cell['wrong']:g}"
    return form.format(_number(cell["us"]), _number(cell["algbw"]), _number(cell["busbw"]), wrong)


def _number(value: float) -> str:
    if 0 < value < 0.1:  # a slow network, or a payload of a few bytes
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def _chosen(rows: list[dict[str, Any]]) -> str:
    """`RING/LL to 64 KiB, RING/SIMPLE (24 channels) from 1 MiB`: in the order of the sizes of each collective."""
    parts = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        turns: list[list[Any]] = []
        for row in rows:
            if row["collective"] == name and row["chosen"]:
                told = row["chosen"]
                word = str(told.get("kernel") or f"{told['algo']}/{told['proto']}")
                if not turns or turns[-1][0] != word:
                    turns.append([word, row["bytes"], row["bytes"]])
                turns[-1][2] = row["bytes"]
        if turns:
            words = [
                f"{word} {size_text(low)}" + (f" to {size_text(high)}" if high > low else "")
                for word, low, high in turns
            ]
            parts.append(f"{name} " + ", ".join(words))
    return "; ".join(parts)


def _stability(told: dict[str, Any], width: int) -> list[str]:
    rates = sorted(told["busbw"])
    at = [rates[min(len(rates) - 1, round(share * (len(rates) - 1)))] for share in (0, 0.01, 0.05, 0.5, 0.95, 1)]
    median = at[3]
    odd = sum(rate < 0.9 * median for rate in rates)
    spark = "".join(_SPARKS[min(7, int(8 * rate / (at[-1] or 1)))] for rate in told["busbw"])
    return [
        f"# stability of {size_text(told['bytes'])}: {len(rates)} calls, a barrier before each",
        "busbw  worst {:.4g}, 1% {:.4g}, 5% {:.4g}, median {:.4g}, 95% {:.4g}, best {:.4g}".format(*at),
        f"{odd} of {len(rates)} calls are more than 10% below the median",
        *textwrap.wrap(spark, width),
    ]


_SPARKS = "▁▂▃▄▅▆▇█"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
