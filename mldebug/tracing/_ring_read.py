"""Reads ring files, of processes that ended in whatever way and of those that still run."""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Iterator

from mldebug.tracing import _ring as layout
from mldebug.tracing._lines import clock


class RingReader:
    """A ring file at one moment. A file that is no ring is a ValueError; wild bytes in it are lines that say so.

    lines = list(RingReader("trace-node1-0-4711.ring").lines(last=100))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as exc:
                raise ValueError(f"{path} is empty") from exc
        if len(self._map) < layout.FIRST or self._map[:24] != layout.MAGIC:
            raise ValueError(f"{path} is no ring of a trace")
        fields = layout.HEAD.unpack(self._map[: layout.HEAD.size])
        _, self._flags, self.pid, self.started_ns, self._clock, length, *parts = fields
        self._slots, self._count, self._texts, self._texts_size, self._values, self._values_size = parts
        ends = (self._slots + self._count * 8, self._texts + self._texts_size, self._values + self._values_size)
        if self._count < 1 or self._count & (self._count - 1) or max(ends) > len(self._map):
            raise ValueError(f"{path} is a ring that was cut short")
        at = layout.HEAD.size
        self.header = self._map[at : at + min(length, layout.HEADER_SIZE - at)].rstrip(b"\n")
        ended_ns = int.from_bytes(self._map[layout.ENDED_AT : layout.HEAD_AT], "little")
        self.ended_ns = ended_ns or None  # None: the process was killed, or still runs
        self._started = (self._clock << 12 & layout.TIME) >> 32
        self._texts_seen: dict[int, tuple[bytes, int, bool] | None] = {}
        self._names: dict[int, bytes] = {}

    def close(self) -> None:
        self._map.close()

    def lines(self, last: int | None = None) -> Iterator[bytes]:
        """The lines in their order, as the text file would have them; only from the newest `last` records, if given.

        The last line of a thread that is older than all others comes first.
        """
        records = self.records(last)
        yield self.header
        inside = {record >> layout.THREAD_SHIFT & 1023 for record in records}
        old = [record for index, record in enumerate(self._last()) if record and index not in inside]
        context = -1
        gone = self._oldest_value(records)
        for index, record in enumerate([*sorted(old, key=self._tick), *records]):
            ref = record & layout.REFS
            thread = record >> layout.THREAD_SHIFT & 1023
            entry = None if ref >= layout.VALUES and index - len(old) < gone else self._text(ref)
            text, own, timed = entry or (b"(a text that was overwritten)", 0, True)
            frame = own or (ref if not timed else 0)
            if own and (thread, own) != context:
                call = self._text(own)
                if call is not None:
                    yield self._before(record, thread, False) + call[0]
            context = (thread, frame) if frame else context
            yield self._before(record, thread, timed) + text

    def records(self, last: int | None = None) -> list[int]:
        """The newest `last` records, or all, oldest first."""
        words = array("Q")
        newest = self._newest()
        count = self._count if last is None else min(last, self._count)
        first = (newest + 1 - count) % self._count
        words.frombytes(self._bytes(first, min(count, self._count - first)))
        words.frombytes(self._bytes(0, count - min(count, self._count - first)))
        if sys.byteorder != "little":
            words.byteswap()
        found = [word for word in words if word]
        if not found:
            return []
        # A thread that was killed before its store leaves a record of the lap before, which is older than all others.
        start = self._tick(found[0])
        return [word for word in found if self._tick(word) + 2 >= start]

    def seconds(self, record: int) -> float:
        """The time of a record, since the start of the trace."""
        return self._tick(record) * 2**20 / 1e9

    def last_seconds(self) -> float | None:
        """The time of the newest record of any thread, or None if there is none."""
        times = [self.seconds(record) for record in self._last() if record]
        return max(times) if times else None

    def _last(self) -> array[int]:
        words = array("Q", self._map[layout.LAST : layout.LAST + layout.THREADS * 8])
        if sys.byteorder != "little":
            words.byteswap()
        return words

    def _bytes(self, first: int, count: int) -> bytes:
        at = self._slots + first * 8
        return self._map[at : at + count * 8]

    def _slot(self, index: int) -> int:
        return int.from_bytes(self._bytes(index % self._count, 1), "little")

    def _newest(self) -> int:
        """The slot of the newest record: at the head, or a little behind it if a thread died before it said so."""
        at = int.from_bytes(self._map[layout.HEAD_AT : layout.HEAD_AT + 8], "little") % self._count
        newest = max((self._tick(record) for record in self._last() if record), default=0)
        found = at
        for step in range(1, 65):
            record = self._slot(at + step)
            if (
                record
                and self._tick(self._slot(at)) <= self._tick(record) <= newest
                and self._is_newest(record, newest)
            ):
                found = (at + step) % self._count
        return found

    def _is_newest(self, record: int, newest: int) -> bool:
        """Whether this record is one of those that a thread left last, and not one of the lap before."""
        return newest - self._tick(record) <= 1 and record in self._last()

    def _tick(self, record: int) -> int:
        return ((record >> 32) - self._started) & 0xFFFF_FFFF

    def _before(self, record: int, thread: int, timed: bool) -> bytes:
        words = [b"%d " % self.pid] if self._flags & layout.LOG_PID else []
        if timed and self._flags & layout.TIMING:
            words.append(clock(int(self.seconds(record))).encode() + b" ")
        if self._flags & layout.SHOW_THREADS:
            words.append(b"[" + self._name(thread) + b"] ")
        return b"".join(words)

    def _name(self, thread: int) -> bytes:
        if thread not in self._names:
            at = layout.NAMES + thread * layout.NAME_SIZE
            self._names[thread] = self._map[at : at + layout.NAME_SIZE].rstrip(b"\0").replace(b"\n", b" ") or b"?"
        return self._names[thread]

    def _text(self, ref: int) -> tuple[bytes, int, bool] | None:
        """The text of a ref, the context it belongs to, and whether it has a time; None if it is not there."""
        if ref in self._texts_seen:
            return self._texts_seen[ref]
        base, size = (self._values, self._values_size) if ref & layout.VALUES else (self._texts, self._texts_size)
        at = (ref & (layout.VALUES - 1)) * layout.UNIT
        found = None
        if at + layout.ENTRY.size <= size:
            start = base + at + layout.ENTRY.size
            context, length, check = layout.ENTRY.unpack(self._map[base + at : start])
            text = self._map[start : start + (length & ~layout.TIMED)]
            if text and layout.check(text) == check:
                found = (text.replace(b"\n", b"\\n"), context & layout.REFS, bool(length & layout.TIMED))
        if not ref & layout.VALUES:
            self._texts_seen[ref] = found
        return found

    def _oldest_value(self, records: list[int]) -> int:
        """The index of the first record whose value is not overwritten: back from the newest, a lap of values."""
        room, at = self._values_size, None
        for index in range(len(records) - 1, -1, -1):
            ref = records[index] & layout.REFS
            if ref < layout.VALUES:
                continue
            here = (ref & (layout.VALUES - 1)) * layout.UNIT
            back = 0 if at is None else (at - here) % self._values_size
            if back > self._values_size // 2:
                continue  # two threads were at it, and this one is a little ahead
            room -= back
            if room < 2 * layout.LONGEST:
                return index + 1
            at = here
        return 0


def read_ring(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a ring file in their order, without line ends, as the text file would have them."""
    reader = RingReader(path)
    try:
        yield from reader.lines()
    finally:
        reader.close()
