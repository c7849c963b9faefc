"""Where to begin comparing when the beginnings of traces are gone: at the same moment, and there at the same line."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter

from mldebug.tracing._ring_read import RingReader
from mldebug.tracing._tail_find import NOT_READABLE, Trace
from mldebug.tracing._tail_read import Ending, Place, raw_blocks, stripped_blocks

_CLOCK = re.compile(rb"\n(?:\d+ )?(\d{1,9}):(\d\d):(\d\d) ")
_WINDOW = 1 << 16
_SEARCHED = 4 << 20


def starts(traces: dict[int, Trace], endings: dict[int, Ending]) -> tuple[dict[int, Place], tuple[int, ...]]:
    """Where the comparison of each trace begins, and the ranks that are left out: they share no time with the others.

    Whole traces begin at their first line. Otherwise they begin at a moment that as many as can be still hold.
    """
    if not any(trace.cut for trace in traces.values()):
        return {rank: Place(0, 0, 0) for rank in traces}, ()
    begins = {rank: _begin(trace) if trace.cut else trace.started for rank, trace in traces.items()}
    # A file system's clock may be behind that of the job.
    ends = {rank: max(begins[rank], endings[rank].stopped + (0 if endings[rank].exact else 1)) for rank in traces}
    moment = _shared_moment(list(begins.values()), list(ends.values()))
    places = {rank: _at(trace, moment) for rank, trace in traces.items() if begins[rank] <= moment <= ends[rank]}
    anchor = _anchor(traces, places)
    left_out = tuple(rank for rank in traces if rank not in places)
    return {rank: _skip_to(traces[rank], place, anchor) for rank, place in places.items()}, left_out


def _shared_moment(begins: list[float], ends: list[float]) -> float:
    """The first moment at which most of the traces had begun and not ended."""
    begins, ends = sorted(begins), sorted(ends)
    return max(begins, key=lambda moment: bisect_right(begins, moment) - bisect_left(ends, moment))


def _begin(trace: Trace) -> float:
    """The time of the first line that is there, since the epoch."""
    if trace.kind == "ring":
        try:
            reader = RingReader(trace.path)
        except NOT_READABLE:
            return trace.started
        records = reader.records()
        seconds = next((reader.seconds(record) for record in records if record), 0.0)
        reader.close()
        return trace.started + seconds
    for _, _, block in raw_blocks(trace):
        match = _CLOCK.search(b"\n" + block)
        if match:
            return trace.started + _seconds(match)
    return trace.started


def _at(trace: Trace, moment: float) -> Place:
    """The place of the first line at or after this moment."""
    after = moment - trace.started
    if trace.kind == "ring":
        try:
            reader = RingReader(trace.path)
        except NOT_READABLE:
            return Place(0, 0, 0)
        at = bisect_left(reader.records(), after, key=reader.seconds) + reader.first
        reader.close()
        return Place(0, 0, at)
    last = Place(0, 0, 0)
    for piece, offset, block in raw_blocks(trace):
        data = b"\n" + block
        last = Place(0, piece, offset + len(block))
        late = [match for match in _CLOCK.finditer(data[-4096:])]
        if late and _seconds(late[-1]) < after:
            continue
        for match in _CLOCK.finditer(data):
            if _seconds(match) >= after:
                return Place(0, piece, offset + match.start())
    return last


def _seconds(match: re.Match[bytes]) -> int:
    return int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])


def _anchor(traces: dict[int, Trace], places: dict[int, Place]) -> bytes | None:
    """The rarest line of the first rank's next ones: a line of an outer loop, if there is one."""
    for rank, place in sorted(places.items()):
        data = b""
        for _, block in stripped_blocks(traces[rank], place):
            data += block
            if len(data) >= _WINDOW:
                break
        lines = data[:_WINDOW].split(b"\n")[:-1]
        counts = Counter(line for line in lines if not line.startswith(b" "))
        if counts:
            return min(counts, key=lambda line: counts[line])
    return None


def _skip_to(trace: Trace, place: Place, anchor: bytes | None) -> Place:
    """The place with the number of bytes before the first such line as a negative position."""
    if anchor is None:
        return place
    seen = 0
    for _, block in stripped_blocks(trace, place):
        at = (b"\n" + block).find(b"\n" + anchor + b"\n")
        if at >= 0:
            return Place(-(seen + at), place.piece, place.offset)
        seen += len(block)
        if seen >= _SEARCHED:
            break
    return place
