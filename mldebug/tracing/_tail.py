"""trace_tail(): what the traces of all ranks say together, read once and in blocks."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from datetime import datetime, timezone

from mldebug.core.errors import UsageError
from mldebug.tracing._tail_find import NOT_READABLE, Found, Trace, find_traces
from mldebug.tracing._tail_index import Index
from mldebug.tracing._tail_part import Parting, count_before, parties, partings, place_of, show
from mldebug.tracing._tail_pool import read_all
from mldebug.tracing._tail_read import Ending, Place, ending
from mldebug.tracing._tail_report import Behind, RankTail, Stop, TraceTailReport, rank_set
from mldebug.tracing._tail_sync import starts


def trace_tail(
    where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    lines: int = 3,
    pattern: str | None = None,
    compare: bool = True,
    processes: int = 1,
) -> TraceTailReport:
    """Say from the traces of all ranks which rank stopped first, where ranks went different ways, and their last lines.

    `where` is the folder that `NicerTrace` wrote to, or some of its files. `lines` last lines of each rank are kept;
    `pattern` is a regular expression whose lines are counted in each rank's trace. `compare=False` leaves the search
    for different ways out: then only the ends of the files are read, unless there is a pattern.
    `processes` says how many are forked to read; more than one is for a program without threads and without a GPU.
    Files that still grow are read as far as they were when they were found. Memory does not grow with their size.
    Raises UsageError if there is no trace, or `pattern` is no regular expression.

        report = trace_tail("/scratch/traces", pattern="all_reduce")
        print(report.text())
    """
    if lines < 1:
        raise UsageError(f"lines={lines}", "ask for 1 line or more")
    began = time.monotonic()
    matcher = _compiled(pattern)
    found = find_traces(where)
    notes = _notes(found)
    endings: dict[int, Ending] = {}
    for rank, trace in found.ranks.items():
        try:
            endings[rank] = ending(trace, lines)
            trace.ended = endings[rank].in_order
        except NOT_READABLE:
            notes.append(f"{trace.path} went away or cannot be read")
    traces = {rank: found.ranks[rank] for rank in endings}
    stop = _stop(endings)
    answered = time.monotonic() - began
    indexes: dict[int, Index] = {}
    ways: tuple[Parting, ...] = ()
    behind: tuple[Behind, ...] = ()
    interrupted = False
    progress = _Progress(sum(trace.size for trace in traces.values()), stop)
    try:
        if compare or matcher is not None:
            kinds = [trace.kind for trace in traces.values()]
            kind = max(sorted(set(kinds)), key=kinds.count) if kinds else "txt"
            same = {rank: trace for rank, trace in traces.items() if trace.kind == kind}
            places, apart = starts(same, endings)
            tasks = [
                (rank, trace, places.get(rank, Place(0, 0, 0)))
                for rank, trace in traces.items()
                if rank in places or matcher is not None
            ]
            indexes = read_all(tasks, matcher, processes, progress.add)
            notes += _left_out(traces, same, apart)
            if compare:
                cut = any(trace.cut for trace in same.values())
                notes += ["the beginning of the files is gone: compared from the moment that all still hold"] * cut
                compared = {rank: indexes[rank] for rank in places}
                groups, rest = parties(compared)
                notes += [f"{len(rest)} ranks more went ways of their own, and were not compared"] * bool(rest)
                ways = partings(compared, groups, cut, progress.say)
                behind = _behind(stop, compared, endings, cut)
    except KeyboardInterrupt:
        interrupted = True
        notes.append("interrupted: not all files were read, and what is said holds for those that were")
    progress.end()
    return TraceTailReport(
        where=os.fspath(where) if isinstance(where, (str, os.PathLike)) else "files",
        world_size=found.world,
        ranks=tuple(_rank(found.ranks[rank], endings[rank], indexes.get(rank), matcher) for rank in endings),
        missing=found.missing,
        stopped_first=stop,
        partings=ways,
        behind=behind,
        pattern=pattern,
        children=len(found.children),
        earlier=len(found.earlier),
        notes=tuple(notes),
        compared=compare and not interrupted,
        interrupted=interrupted,
        bytes=sum(trace.size for trace in traces.values()),
        seconds=time.monotonic() - began,
        seconds_to_endings=answered,
    )


def _compiled(pattern: str | None) -> re.Pattern[bytes] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern.encode("utf-8", "surrogateescape"))
    except re.error as exc:
        raise UsageError(
            f"pattern {pattern!r} is no regular expression: {exc}", "put a backslash before its signs"
        ) from exc


def _stop(endings: dict[int, Ending]) -> Stop | None:
    """Who stopped first, if it can be told: those within a second of the first, and how long before the others."""
    if len(endings) < 2:
        return None
    times = {rank: end.stopped for rank, end in endings.items()}
    first = min(times.values())
    ranks = tuple(sorted(rank for rank, stopped in times.items() if stopped - first <= _TOGETHER))
    others = [stopped for stopped in times.values() if stopped - first > _TOGETHER]
    exact = all(end.exact for end in endings.values())
    in_order = all(endings[rank].in_order for rank in ranks)
    leader = min(ranks, key=lambda rank: (times[rank], rank))
    if not others:
        return Stop(ranks, leader, 0.0, max(times.values()) - first, exact, in_order, True)
    last = max(times[rank] for rank in ranks)
    return Stop(ranks, leader, min(others) - last, max(others) - last, exact, in_order, False)


_TOGETHER = 1.0  # seconds


def _behind(stop: Stop | None, compared: dict[int, Index], endings: dict[int, Ending], cut: bool) -> tuple[Behind, ...]:
    """For those that stopped first the line and its iteration."""
    found = []
    for rank in (stop.ranks if stop is not None and not stop.together else ())[:3]:
        if rank in compared and endings[rank].lines:
            line = endings[rank].lines[-1].encode()
            mark = (line, compared[rank].length)
            count = None if cut else count_before(compared[rank], [mark])[mark]
            found.append(Behind(rank, place_of(line), show(compared[rank].around(mark[1] - 1).following), count))
    return tuple(found)


def _rank(trace: Trace, end: Ending, found: Index | None, matcher: re.Pattern[bytes] | None) -> RankTail:
    stopped = datetime.fromtimestamp(max(0.0, min(end.stopped, 2.5e11)), timezone.utc)
    count = found.matches if found is not None and matcher is not None else None
    return RankTail(
        trace.rank, trace.host, trace.pid, trace.path, stopped.isoformat(), end.clock, end.in_order, end.lines, count
    )


def _notes(found: Found) -> list[str]:
    notes = []
    if found.earlier:
        pids = len(found.earlier)
        notes.append(
            f"{pids} trace{'s' * (pids != 1)} of earlier attempts in the folder: the newest of each rank was taken"
        )
    if found.unreadable:
        notes.append(
            f"cannot be read, or empty: {', '.join(map(os.path.basename, found.unreadable[:3]))}"
            + (f" and {len(found.unreadable) - 3} more" if len(found.unreadable) > 3 else "")
        )
    return notes


def _left_out(traces: dict[int, Trace], same: dict[int, Trace], apart: tuple[int, ...]) -> list[str]:
    other = [rank for rank in traces if rank not in same]
    notes = [f"rank {rank_set(other)} wrote another kind of file, and was not compared"] if other else []
    if apart:
        notes.append(f"rank {rank_set(apart)} not compared: no time is in those files and in most of the others")
    return notes


class _Progress:
    """A line on stderr, where that is a terminal, rewritten a few times a second. It begins with the first answer."""

    def __init__(self, total: int, stop: Stop | None) -> None:
        self._total, self._done, self._next = total, 0, 0.0
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._began = time.monotonic()
        if self._shown and stop is not None and total > 1 << 28:
            sys.stderr.write(f"{stop.text()}\n")

    def add(self, count: int) -> None:
        self._done += count
        if self._shown and time.monotonic() >= self._next:
            spent = time.monotonic() - self._began
            rate = self._done / max(spent, 1e-3) / 1e6
            left = (self._total - self._done) / 1e6 / max(rate, 1e-3)
            self.say(f"read {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, {rate:.0f} MB/s, {left:.0f} s left")

    def say(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._next = time.monotonic() + 0.2

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
