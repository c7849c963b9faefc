"""Reads traces in big blocks: their text without times, and their last lines."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mldebug.tracing._lines import clock
from mldebug.tracing._ring_read import RingReader
from mldebug.tracing._tail_find import NOT_READABLE, Trace

BLOCK = 1 << 19
THE_END = b"(the end)\n"  # the last line of a trace that was closed: a rank that goes on there does not do the same
_LONGEST_LINE = 4 << 20
_META = b"\n# mldebug trace "
_SAMPLE = 4096
_MOST_SECONDS = 64  # in a block; beyond that the pattern is faster
_CLOCK = re.compile(rb"\n\d+:\d\d:\d\d ")
_OTHERS = re.compile(rb"\n\[(?!MainThread\] )[^\n]*(?=\n)")
_METAS = re.compile(rb"\n# mldebug trace [^\n]*(?=\n)")
_CALLS = re.compile(rb"\n        .*")
_VALUES = re.compile(rb"(\n {8}[^\n(]*)\([^\n]*|( <- | !! )[^\n]*")
LINE = re.compile(rb"(?:(\d+) )?(?:(\d{1,9}):(\d\d):(\d\d) )?(?:\[([^\]]*)\] )?(.*)", re.DOTALL)


def raw_blocks(trace: Trace, piece: int = 0, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Whole lines of a text trace: the number of the piece, where in it the block begins, the block.

    Reads up to the size that the files had when they were found. A line that is cut off at the end is left out; one
    of more than 4 MiB comes in parts.
    """
    for number in range(piece, len(trace.pieces)):
        path = trace.pieces[number]
        left = 1 << 62 if path.endswith(".gz") else trace.sizes[number] - offset
        at, rest = offset, b""
        offset = 0
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb", buffering=0) as file:
                file.seek(at)
                while left > 0:
                    data = file.read(min(BLOCK, left))
                    if not data:
                        break
                    left -= len(data)
                    data = rest + data
                    end = data.rfind(b"\n") + 1 or (len(data) if len(data) > _LONGEST_LINE else 0)
                    block, rest = data[:end], data[end:]
                    if block:
                        yield number, at, block
                        at += len(block)
        except NOT_READABLE:
            continue  # a piece that was dropped or broken in the meantime: what came before it is what there is


def strip(block: bytes, trace: Trace, calls: bool | None = None) -> bytes:
    """The lines of the main thread without pid, time, thread and values.

    Calls are left out, unless there is nothing else: where threads take turns they are shown again.
    """
    data = without_meta(b"\n" + block)
    own = b"\n%d " % trace.pid
    if own in data[:_SAMPLE]:
        data = data.replace(own, b"\n")
    data = _without_clock(data)
    if b"\n[" in data:
        data = _OTHERS.sub(b"", data).replace(b"\n[MainThread] ", b"\n")
    return _same_for_all(data, trace, calls)[1:]


def _same_for_all(data: bytes, trace: Trace, calls: bool | None = None) -> bytes:
    if trace.values:
        data = _VALUES.sub(_without_value, data)
    return data if (trace.calls if calls is None else calls) else _CALLS.sub(b"", data)


def without_meta(data: bytes) -> bytes:
    """A block that begins with a newline without the first and last lines of files, which say whose they are."""
    while data.startswith(_META) and (end := data.find(b"\n", 1)) > 0:
        data = data[end:]
    return _METAS.sub(b"", data) if _META in data else data


def _without_clock(data: bytes) -> bytes:
    """Second after second, as a fixed string is replaced several times faster than a pattern."""
    first = _CLOCK.search(data)
    if first is None:
        return data
    parts, at, second = [], 0, _seconds(first[0])
    for _ in range(_MOST_SECONDS):
        now, second = second, second + 1
        end = data.find(b"\n%s " % clock(second).encode(), at)
        parts.append(data[at : end if end >= 0 else len(data)].replace(b"\n%s " % clock(now).encode(), b"\n"))
        at = end
        if end < 0:
            break
    else:
        parts.append(data[at:])
    data = b"".join(parts)
    return _CLOCK.sub(b"\n", data) if _CLOCK.search(data) else data


def _seconds(shown: bytes) -> int:
    hour, minute, second = shown[-_SAMPLE:].split()[0].split(b":")
    return int(hour[-9:]) * 3600 + int(minute) * 60 + int(second)


def _without_value(match: re.Match[bytes]) -> bytes:
    return match[1] if match[1] is not None else match[2].rstrip()


@dataclass
class Place:
    """Where a block of stripped text begins."""

    stripped: int
    piece: int
    offset: int


def stripped_blocks(trace: Trace, start: Place) -> Iterator[tuple[Place, bytes]]:
    """The text of the main thread from a place on, as blocks of whole lines."""
    at = start.stripped
    if trace.kind == "ring":
        for offset, data in _ring_blocks(trace, start.offset):
            yield Place(at, 0, offset), data
            at += len(data)
        return
    for piece, offset, block in raw_blocks(trace, start.piece, start.offset):
        data = strip(block, trace)
        yield Place(at, piece, offset), data
        at += len(data)


_RECORDS = 16_384


def _ring_blocks(trace: Trace, first: int) -> Iterator[tuple[int, bytes]]:
    """The offset in a ring is the number of the record since the start, or 0 for the oldest; none if it is gone now."""
    try:
        reader = RingReader(trace.path)
    except NOT_READABLE:
        return
    records = reader.records()
    if 0 < first < reader.first:
        return
    for at in range(max(0, first - reader.first), len(records), _RECORDS):
        data = reader.main_text(records[at : at + _RECORDS])
        if data:
            yield reader.first + at, _same_for_all(b"\n" + data, trace)[1:]
    reader.close()


def lines_in_calls(trace: Trace, place: Place) -> Iterator[tuple[int, bytes | None, bytes]]:
    """The lines of the text from a place on: where each begins, the call that it is in if that is known, the line."""
    at, call = place.stripped, None
    for own, line in _ring_lines(trace, place) if trace.kind == "ring" else _text_lines(trace, place):
        call = own or call
        if trace.calls or not line.startswith(b" " * 8):
            yield at, call, line
            at += len(line) + 1


def _text_lines(trace: Trace, place: Place) -> Iterator[tuple[bytes | None, bytes]]:
    for _, _, block in raw_blocks(trace, place.piece, place.offset):
        for line in strip(block, trace, calls=True).split(b"\n")[:-1]:
            yield (line.strip() if line.startswith(b" " * 8) else None), line


def _ring_lines(trace: Trace, place: Place) -> Iterator[tuple[bytes | None, bytes]]:
    try:
        reader = RingReader(trace.path)
    except NOT_READABLE:
        return
    records = reader.records()
    for number in range(max(0, place.offset - reader.first), len(records)):
        text = reader.main_text(records[number : number + 1])
        if text:
            yield reader.call_of(records[number]), _same_for_all(b"\n" + text, trace, calls=True)[1:-1]
    reader.close()


@dataclass(frozen=True)
class Ending:
    """How a trace ends: its last lines of the main thread, and when."""

    lines: tuple[str, ...]  # without times, oldest first
    clock: float | None  # h:mm:ss of the last line, as seconds since the start; None where lines have no time
    stopped: float  # seconds since the epoch
    exact: bool  # `stopped` is better than a second
    in_order: bool  # the trace was closed, and not cut off by the end of the process


def ending(trace: Trace, count: int) -> Ending:
    """The last `count` lines, read from the end."""
    if trace.kind == "ring":
        return _ring_ending(trace, count)
    tail, lines, want = b"", [], 1 << 16
    while True:
        tail, whole = _tail(trace, want)
        lines = _main_lines(tail, trace)
        if whole or len(lines) >= count + 1 or want >= _LONGEST_LINE:
            break
        want *= 8
    found = [match for match in map(LINE.fullmatch, tail.splitlines()) if match is not None]
    times = [match for match in found if match[2]]
    clock = None
    if times:
        hour, minute, second = (int(times[-1][group]) for group in (2, 3, 4))
        clock = float(hour * 3600 + minute * 60 + second)
    in_order = any(line.startswith(_END) for line in tail.splitlines())
    stopped, exact = trace.written, True
    if clock is not None and not -1 < trace.written - trace.started - clock < 2.5:
        stopped, exact = trace.started + clock, False  # the files were copied: their times are of the copy
    return Ending(tuple(map(_shown, lines[-count:])), clock, stopped, exact, in_order)


_END = b"# mldebug trace end"


def _ring_ending(trace: Trace, count: int) -> Ending:
    reader = RingReader(trace.path)
    try:
        lines: list[bytes] = []
        for last in (max(count * 8, 1024), None):
            records = reader.records(last)
            lines = _same_for_all(b"\n" + reader.main_text(records), trace).split(b"\n")[1:-1]
            if len(lines) >= count:
                break
        seconds = reader.last_seconds()
        stopped = trace.started + seconds if seconds is not None else trace.started
        return Ending(tuple(map(_shown, lines[-count:])), seconds, stopped, True, reader.ended_ns is not None)
    finally:
        reader.close()


def _tail(trace: Trace, want: int) -> tuple[bytes, bool]:
    """The last `want` bytes of a text trace from a line's beginning on, and whether that is all there is."""
    data = b""
    for path in reversed(trace.pieces):
        need = want - len(data)
        try:
            if path.endswith(".gz"):
                data = _gz_tail(path, need) + data
            else:
                with open(path, "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - need))
                    data = file.read(need) + data
        except NOT_READABLE:
            break
        if len(data) >= want:
            return data.partition(b"\n")[2], False
    return data, True


def _gz_tail(path: str, want: int) -> bytes:
    tail = b""
    with gzip.open(path) as file:
        while True:
            data = file.read(BLOCK)
            if not data:
                return tail
            tail = (tail + data)[-want:]


def _main_lines(data: bytes, trace: Trace) -> list[bytes]:
    return strip(data if data.endswith(b"\n") else data + b"\n", trace).split(b"\n")[:-1]


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else "?" for sign in text)
