"""TraceTailReport: the answer first, then the last lines of all ranks side by side."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from mldebug.core.report import Report, paint
from mldebug.tracing._lines import clock
from mldebug.tracing._tail_part import Parting

_PARTINGS, _GROUPS, _COUNTS, _NOTES = 5, 12, 8, 6  # the most of each part that is shown as text


@dataclass(frozen=True)
class RankTail:
    """The end of one rank's trace."""

    rank: int
    host: str
    pid: int
    path: str
    stopped: str  # UTC
    clock: float | None  # seconds since the start of the trace, as its lines have it
    in_order: bool  # the trace was closed; otherwise the process was killed, or it still runs
    lines: tuple[str, ...]
    matches: int | None  # lines with the pattern


@dataclass(frozen=True)
class Stop:
    """Which ranks stopped first. All of them, if they stopped within a second: then `first` is a hint."""

    ranks: tuple[int, ...]
    first: int
    before_next: float  # seconds
    before_last: float
    exact: bool  # False: the times are those in the lines, whole seconds
    in_order: bool  # their traces were closed in order: the program ended, or left the scope
    together: bool  # all ranks

    def text(self) -> str:
        about = "" if self.exact else "about "
        if self.together:
            return f"all ranks wrote their last line within {about}{self.before_last:.1f} s of each other"
        how = ", in order" if self.in_order else ""
        words = f"rank {rank_set(self.ranks)} stopped first{how}, {about}{self.before_next:.1f} s before the next"
        return words + (f" and {self.before_last:.1f} s before the last" if self.before_last > self.before_next else "")


@dataclass(frozen=True)
class Behind:
    """The last line of a rank that stopped early, and how often it had run before."""

    rank: int
    place: str
    call: str
    iteration: int | None


@dataclass(frozen=True)
class TraceTailReport(Report):
    """What `trace_tail()` found in the traces of a job.

    `partings` are the lines after which ranks went different ways, in order; `stopped_first` is None for one rank.
    `ok` is false if a rank is missing, ranks parted at a line that does not ask for the rank, or one stopped more than
    5 s before the others and not in order.

        report = trace_tail("/scratch/traces")
        report.partings[0].place, report.partings[0].iteration
    """

    where: str
    world_size: int
    ranks: tuple[RankTail, ...]
    missing: tuple[int, ...]
    stopped_first: Stop | None
    partings: tuple[Parting, ...]
    behind: tuple[Behind, ...]
    pattern: str | None
    children: int  # traces of processes that ranks forked, such as the workers of a DataLoader
    earlier: int  # traces of earlier attempts
    notes: tuple[str, ...]
    compared: bool
    interrupted: bool
    bytes: int
    seconds: float
    seconds_to_endings: float

    @property
    def ok(self) -> bool:
        stop = self.stopped_first
        early = stop is not None and not stop.together and not stop.in_order and stop.before_next > 5
        return not self.missing and not early and not any(self._counts(parting) for parting in self.partings)

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        found["missing"] = rank_set(self.missing)
        if self.stopped_first is not None:
            found["stopped_first"]["ranks"] = rank_set(self.stopped_first.ranks)
        for parting, entry in zip(self.partings, found["partings"], strict=True):
            for way, shown in zip(parting.ways, entry["ways"], strict=True):
                shown["ranks"] = rank_set(way.ranks)
        return found

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [*self._answer(), "", *self._last(), *self._matches(), *self._small()]
        text = "\n".join(row for line in lines for row in _fit(line, width))
        return paint(text) if color else text

    def _counts(self, parting: Parting) -> bool:
        """Whether a parting is trouble: one at a line that asks for the rank is not, unless the ranks never meet."""
        return not parting.expected or not parting.meets

    def _answer(self) -> list[str]:
        have = len(self.ranks)
        lines = [
            f"{have} of {self.world_size} ranks"
            + (f"; no trace of rank {rank_set(self.missing)}" if self.missing else "")
        ]
        stops = [] if self.stopped_first is None else [self.stopped_first.text()]
        stops += [
            f"  rank {end.rank} at {end.place}{_iteration(end.iteration)}{_inside(end.call)}" for end in self.behind
        ]
        together = self.stopped_first is None or self.stopped_first.together
        lines += [] if together else stops
        cut = [rank.rank for rank in self.ranks if not rank.in_order]
        if cut:
            who = "no rank ended its trace" if len(cut) == have else f"rank {rank_set(cut)} did not end the trace"
            lines.append(f"{who}: killed, or still running")
        trouble = [parting for parting in self.partings if self._counts(parting)]
        asked = [parting for parting in self.partings if not self._counts(parting)]
        for parting in trouble[:_PARTINGS]:
            lines += _ways(parting)
        if len(trouble) > _PARTINGS:
            lines.append(f"and {len(trouble) - _PARTINGS} places more (--json has them)")
        if self.compared and not trouble:
            lines.append(
                "no rank went another way than the others" + (", but for lines that ask for the rank:" if asked else "")
            )
        elif asked:
            lines.append("also, at lines that ask for the rank:")
        for parting in asked[:_PARTINGS]:
            sets = " | ".join(rank_set(way.ranks) for way in parting.ways)
            lines.append(f"  {parting.place}: {_cut(parting.line, 40)}   {sets}{_times(parting)}")
        if len(asked) > _PARTINGS:
            lines.append(f"  and {len(asked) - _PARTINGS} places more")
        return lines + stops if together else lines  # whoever was a second earlier says less than where they parted

    def _last(self) -> list[str]:
        """Ranks with the same last lines are one group; who stopped first comes first."""
        groups: dict[tuple[str, ...], list[RankTail]] = {}
        for rank in sorted(self.ranks, key=lambda rank: rank.stopped):
            groups.setdefault(rank.lines, []).append(rank)
        shown = list(groups.items())[:_GROUPS]
        names = [rank_set(rank.rank for rank in ranks) for _, ranks in shown]
        times = [_clocks(ranks) for _, ranks in shown]
        wide, late = min(max(map(len, [*names, "rank"])), 24), max(map(len, [*times, "time"]))
        lines = [f"last lines\n{'rank':<{wide}}  {'time':<{late}}  line"] if shown else []
        for (texts, _), name, when in zip(shown, names, times, strict=True):
            for number, line in enumerate(texts or ("(no line)",)):
                left = f"{_cut(name, wide):<{wide}}  {when:<{late}}" if number == 0 else " " * (wide + late + 2)
                lines.append(f"{left}  {line.strip() if not line.startswith(' ') else '> ' + line.strip()}")
        if len(groups) > _GROUPS:
            rest = [rank.rank for _, ranks in list(groups.items())[_GROUPS:] for rank in ranks]
            lines.append(f"and {len(groups) - _GROUPS} others: rank {_cut(rank_set(rest), 50)}")
        return lines

    def _matches(self) -> list[str]:
        """Counts of the pattern: those that differ most from the usual first."""
        counts: dict[int, list[int]] = {}
        for rank in self.ranks:
            if rank.matches is not None:
                counts.setdefault(rank.matches, []).append(rank.rank)
        if not counts:
            return []
        usual = median_low([count for count, ranks in counts.items() for _ in ranks])
        order = sorted(counts, key=lambda count: (-abs(count - usual), count))
        lines = ["", f"lines with {self.pattern!r}"]
        lines += [f"{count:>12,}  rank {rank_set(counts[count])}" for count in order[:_COUNTS]]
        if len(order) > _COUNTS:
            lines.append(f"              and {len(order) - _COUNTS} counts more, the usual {usual:,}")
        return lines

    def _small(self) -> list[str]:
        notes = list(self.notes)
        if self.children:
            notes.append(f"{self.children} traces of processes that ranks forked, such as DataLoader workers, left out")
        return ["", *(f"note: {note}" for note in notes[:_NOTES])] if notes else []


def rank_set(ranks: Iterable[int]) -> str:
    """Ranks with runs folded.

    rank_set([0, 1, 2, 4])  # "0-2,4"
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _ways(parting: Parting) -> list[str]:
    again = "" if parting.meets else ", and never meet again"
    lines = [f"ranks part at {parting.place}{_iteration(parting.iteration)}{_inside(parting.call)}{again}:"]
    lines.append(f"  after {_cut(parting.line, 60)}{_times(parting)}")
    lines += [f"  rank {_cut(rank_set(way.ranks), 40)} -> {way.line.strip()}" for way in parting.ways]
    return lines


def _iteration(iteration: int | None) -> str:
    return "" if iteration is None else f" in iteration {iteration}"


def _inside(call: str) -> str:
    return f" ({_cut(call.rpartition('/')[2], 40)})" if call else ""


def _times(parting: Parting) -> str:
    return f" ({parting.times:,} times)" if parting.times > 1 else ""


def _clocks(ranks: list[RankTail]) -> str:
    times = sorted(int(rank.clock) for rank in ranks if rank.clock is not None)
    if not times:
        return "-"
    return clock(times[0]) if times[0] == times[-1] else f"{clock(times[0])}-{clock(times[-1])}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _fit(line: str, width: int) -> list[str]:
    """Lines of the traces are cut at the width; sentences go on in the next line."""
    rows = []
    for part in line.split("\n"):
        if len(part) <= width:
            rows.append(part)
        elif (
            part.startswith((" ", "note: ", "ranks part", "rank ")) and " -> " not in part and "  " not in part.strip()
        ):
            rows += textwrap.wrap(part, width, subsequent_indent="    ", break_on_hyphens=False) or [""]
        else:
            rows.append(_cut(part, width))
    return rows
