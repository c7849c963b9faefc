"""One pass over a trace: digests of its text, where each part of that is in the files, and counts of a pattern."""

from __future__ import annotations

import hashlib
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mldebug.tracing._ring_read import RingReader
from mldebug.tracing._tail_find import NOT_READABLE, Trace
from mldebug.tracing._tail_read import THE_END, Place, lines_in_calls, raw_blocks, strip, stripped_blocks, without_meta

CHUNK = 1 << 20  # bytes of text that one digest is of, but for the first few, which are smaller
DIGEST = 8  # bytes


def bound(chunk: int) -> int:
    """Where the chunk with this number begins: 0, 4 kB, 16 kB, 64 kB, 256 kB, and then every 1 MiB."""
    return 0 if chunk == 0 else 4096 * 4 ** (chunk - 1) if chunk < 5 else (chunk - 4) * CHUNK


@dataclass
class Index:
    """What is compared instead of the text. Positions are bytes of text without times, from where the trace starts."""

    trace: Trace
    digests: bytes = b""  # of the whole chunks
    length: int = 0
    tail: bytes = b""  # the digest of what is behind the last whole chunk
    matches: int = 0  # lines of all threads that have the pattern
    _places: array[int] = field(default_factory=lambda: array("q"))  # position, piece, offset of each block
    _positions: array[int] = field(default_factory=lambda: array("q"))

    @property
    def chunks(self) -> int:
        return len(self.digests) // DIGEST

    def add_place(self, place: Place) -> None:
        self._positions.append(place.stripped)
        self._places.extend((place.piece, place.offset))

    def text(self, position: int = 0) -> Iterator[bytes]:
        """The text from a position on, in blocks that end with whole lines."""
        if not self._positions:
            return
        at = max(0, bisect_right(self._positions, position) - 1)
        start = Place(self._positions[at], self._places[2 * at], self._places[2 * at + 1])
        last = THE_END if self.trace.ended else b""
        end = self.length - len(last)
        for place, data in stripped_blocks(self.trace, start):
            if place.stripped >= end:
                break  # the file has grown since
            data = data[max(0, position - place.stripped) : end - place.stripped]
            if data:
                yield data
        if last:
            yield last[max(0, position - end) :]

    def around(self, position: int) -> Surroundings:
        """The calls at a position of the text."""
        last = bisect_right(self._positions, position) - 1
        for back in _LOOK_BACK if self._positions else ():
            at = max(0, last - back)
            start = Place(self._positions[at], self._places[2 * at], self._places[2 * at + 1])
            before: dict[bytes, tuple[int, bytes]] = {}
            inside = following = b""
            for where, call, line in lines_in_calls(self.trace, start):
                following = call or b""
                if where >= position:
                    break
                inside = following
                before[inside] = where, line
            if following or at == 0:
                return Surroundings(inside, following, before)
        return Surroundings(b"", b"", {})


@dataclass
class Surroundings:
    """A position of a text: the calls that the lines before and behind it are in, and the last line of each call."""

    inside: bytes
    following: bytes
    before: dict[bytes, tuple[int, bytes]]  # with where it begins


_LOOK_BACK = (1, 8, 64)  # blocks


def index(trace: Trace, start: Place, pattern: re.Pattern[bytes] | None, progress: Callable[[int], None]) -> Index:
    """Read a trace once, digesting it from `start` on, and counting lines with the pattern from the beginning on."""
    found = Index(trace)
    digester = _Digester()
    if trace.kind == "ring":
        if pattern is not None:
            found.matches = _ring_matches(trace, pattern)
        for place, data in stripped_blocks(trace, start):
            found.add_place(place)
            digester.add(data[max(0, -place.stripped) :])
        progress(trace.size)
    else:
        first = (0, 0) if pattern is not None else (start.piece, start.offset)
        at = start.stripped
        for piece, offset, block in raw_blocks(trace, *first):
            if pattern is not None:
                found.matches += count_lines(pattern, block)
            if (piece, offset + len(block)) > (start.piece, start.offset):
                if piece == start.piece and offset < start.offset:
                    block, offset = block[start.offset - offset :], start.offset
                data = strip(block, trace)
                found.add_place(Place(at, piece, offset))
                digester.add(data[max(0, -at) :])
                at += len(data)
            progress(len(block))
    if trace.ended:
        digester.add(THE_END)
    found.digests, found.length, found.tail = bytes(digester.digests), digester.length, digester.tail
    return found


class _Digester:
    """Digests of each chunk of what is added."""

    def __init__(self) -> None:
        self.digests = bytearray()
        self.length, self._end = 0, bound(1)
        self._hash = hashlib.sha1(usedforsecurity=False)

    @property
    def tail(self) -> bytes:
        return self._hash.digest()

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = self._end - self.length
            part, view = view[:room], view[room:]
            self._hash.update(part)
            self.length += len(part)
            if self.length == self._end:
                self.digests += self._hash.digest()[:DIGEST]
                self._end = bound(len(self.digests) // DIGEST + 1)
                self._hash = hashlib.sha1(usedforsecurity=False)


def count_lines(pattern: re.Pattern[bytes], block: bytes) -> int:
    """How many lines of a block have a match."""
    block = without_meta(b"\n" + block)[1:]
    count = at = 0
    while at < len(block):
        match = pattern.search(block, at)
        if match is None:
            break
        end = block.find(b"\n", match.start())
        count += 1
        at = end + 1 if end >= 0 else len(block)
    return count


def _ring_matches(trace: Trace, pattern: re.Pattern[bytes]) -> int:
    try:
        reader = RingReader(trace.path)
    except NOT_READABLE:
        return 0
    count = sum(times for text, times in reader.counts() if pattern.search(text))
    reader.close()
    return count
