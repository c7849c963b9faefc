"""From what was read of the logs to the report: whose each traceback is, which came first, who is silent."""

from __future__ import annotations

import dataclasses
from typing import Any

from mldebug.ranks._logs_fold import rank_set
from mldebug.ranks._logs_found import FoldedLine, LogTraceback, Message, Silent
from mldebug.ranks._logs_normal import normal
from mldebug.ranks._logs_outside import is_interrupt, is_launcher, outside
from mldebug.ranks._logs_reading import Reading
from mldebug.ranks._logs_report import LogsReport
from mldebug.ranks._logs_source import NOBODY, Source
from mldebug.ranks._logs_traceback import Kind
from mldebug.ranks._logs_words import brackets


def make_report(reading: Reading, folded: tuple[FoldedLine, ...]) -> LogsReport:
    """The report of what was read."""
    names = _Names(reading)
    ends = reading.ends
    ends.settle(names.every)
    kinds = [kind for kind in reading.kinds.all.values() if not kind.launcher]
    first = next((one.rank for one in ends.failures.values() if one.first), None)
    timed = all(kind.time for kind in kinds) and len({len(kind.time) for kind in kinds}) == 1
    first_of_torchrun = [kind for kind in kinds if not kind.victim and first in names.ranks(kind.mask)]

    def place(kind: Kind) -> tuple[Any, ...]:
        by = kind.time if timed else b""
        return (bool(kind.victim), _is_survived(kind), not kind.whole, kind not in first_of_torchrun, by, kind.order)

    kinds.sort(key=place)
    by = (
        "torchrun"
        if first_of_torchrun and len([kind for kind in kinds if not kind.victim]) > 1
        else "time"
        if timed
        else "order"
    )
    tracebacks = tuple(_traceback(kind, names) for kind in kinds)
    failures = tuple({**dataclasses.asdict(one), "ended": one.words} for one in ends.failures.values())
    silent = _silent(reading, names, tracebacks)
    return LogsReport(
        tuple(reading.names),
        reading.lines,
        reading.size,
        tuple(reading.used),
        tuple(sorted({*names.every, *(ends.failures if reading.ranks is None else ())})),
        tracebacks,
        by,
        silent,
        failures,
        _timeouts(reading, names),
        tuple(
            {"said": said, "ranks": names.ranks(mask), "others": names.others(mask)}
            for said, mask in ends.events.items()
        ),
        reading.broken + reading.interleaved,
        folded,
        reading.window.folded,
        reading.split_files,
        tuple(_notes(reading, names)),
        reading.interrupted,
        None if ends.timeouts else outside(tracebacks, silent, failures, ends.events),
    )


class _Names:
    """From the bits of sources to ranks, once all is known of them."""

    def __init__(self, reading: Reading) -> None:
        self._sources = sources = reading.sources.all
        spoke = {one.rank for one in sources if one.rank is not None and one.last and one.wanted}
        traced = {rank for kind in reading.kinds.all.values() for rank in self.ranks(kind.mask)}
        self.every = tuple(sorted(spoke | traced))
        chosen_by = ((one.local if one.rank is None else one.rank, one) for one in sources)
        self.there = {rank for rank, one in chosen_by if rank is not None and (one.last or one.traced)}

    def _of(self, mask: int) -> list[Source]:
        return [one for one in self._sources if mask & one.bit]

    def ranks(self, mask: int) -> tuple[int, ...]:
        return tuple(sorted({one.rank for one in self._of(mask) if one.rank is not None}))

    def others(self, mask: int) -> tuple[str, ...]:
        return tuple(sorted({one.words for one in self._of(mask) if one.rank is None}))


def _traceback(kind: Kind, names: _Names) -> LogTraceback:
    messages = tuple(Message(_decoded(seen[1]), names.ranks(seen[0])) for seen in kind.messages.values())  # type: ignore[arg-type]
    return LogTraceback(
        _decoded(kind.text), _decoded(kind.exception), kind.victim, names.ranks(kind.mask), names.others(kind.mask),
        kind.times, messages, kind.more_messages, _decoded(kind.time), kind.file, kind.line, kind.whole,
        _is_survived(kind),
    )  # fmt: skip


def _is_survived(kind: Kind) -> bool:
    return kind.mask & ~kind.survived == 0


def _silent(reading: Reading, names: _Names, tracebacks: tuple[LogTraceback, ...]) -> tuple[Silent, ...]:
    """The ranks without a traceback, those that end alike together; the few first, as they are the odd ones."""
    spoke = {rank for one in tracebacks for rank in one.ranks}
    if any(NOBODY in one.others and not (is_interrupt(one) and is_launcher(one)) for one in tracebacks):
        return ()  # whose these are nobody can tell
    last: dict[int, bytes] = {}
    for source in reading.sources.all:
        if source.rank is not None and source.last and source.wanted:
            last[source.rank] = source.last
    groups: dict[tuple[str, bytes], list[int]] = {}
    ranks = set(names.every) | {
        rank for rank in reading.ends.failures if reading.ranks is None or rank in reading.ranks
    }
    for rank in sorted(ranks - spoke):
        failure = reading.ends.failures.get(rank)
        groups.setdefault((failure.words if failure else "", normal(last.get(rank, b""), rank, None)[0]), []).append(
            rank
        )
    found = [Silent(tuple(ranks), _decoded(last.get(ranks[0], b"")), ended) for (ended, _), ranks in groups.items()]
    return tuple(sorted(found, key=lambda one: ("SIGTERM" in one.ended, len(one.ranks), one.ranks)))


def _timeouts(reading: Reading, names: _Names) -> tuple[dict[str, Any], ...]:
    ranks = set(names.every)
    complained = {rank for mask in reading.ends.timeouts.values() for rank in names.ranks(mask)}
    return tuple(
        {"op": op, "seq": seq, "ranks": names.ranks(mask), "missing": tuple(sorted(ranks - complained))}
        for (op, seq), mask in sorted(reading.ends.timeouts.items(), key=lambda item: item[0][1])
    )


def _notes(reading: Reading, names: _Names) -> list[str]:
    notes = list(reading.notes)
    absent = (reading.ranks or frozenset()) - names.there
    if absent:
        there = (
            f"there are lines of {brackets(names.there)}" if names.there else "no line names its rank (see --prefix)"
        )
        notes.append(f"no line is of rank {rank_set(absent)}; {there}")
    groups: dict[str, dict[int, list[int]]] = {}
    for (index, group), enqueued in reading.ends.enqueued.items():
        groups.setdefault(group, {}).setdefault(enqueued, []).extend(names.ranks(1 << index))
    for group, queued in groups.items():
        if len(queued) > 1:
            low, high = min(queued), max(queued)
            notes.append(f"NCCL work of group {group}: {brackets(queued[low])} had enqueued {low}, others up to {high}")
    if reading.kinds.left_out:
        notes.append(f"{reading.kinds.left_out} tracebacks of further kinds were left out")
    return notes


def _decoded(text: object) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
