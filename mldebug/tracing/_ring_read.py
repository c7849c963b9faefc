"""Reads ring files, of processes that ended in whatever way and of those that still run."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

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
        self._flags: int
        self._clock: int
        self.pid: int
        self.started_ns: int
        length: int
        _, self._flags, self.pid, self.started_ns, self._clock, length, *parts = fields
        self._slots, self._count, self._texts, self._texts_size, self._values, self._values_size = parts
        ends = (self._slots + self._count * 8, self._texts + self._texts_size, self._values + self._values_size)
        if self._count < 1 or self._count & (self._count - 1) or max(ends) > len(self._map):
            raise ValueError(f"{path} is a ring that was cut short")
        self._words = memoryview(self._map)[self._slots : self._slots + self._count * 8].cast("Q")
        at = layout.HEAD.size
        self.header = self._map[at : at + min(length, layout.HEADER_SIZE - at)].rstrip(b"\n")
        ended_ns = int.from_bytes(self._map[layout.ENDED_AT : layout.HEAD_AT], "little")
        self.ended_ns = ended_ns or None  # None: the process was killed, or still runs
        self._started = (self._clock << 12 & layout.TIME) >> 32
        self.first = 0
        self._plain = _Plain(self)
        self._texts_seen: dict[int, tuple[bytes, int, bool] | None] = {}
        self._names: dict[int, bytes] = {}

    def close(self) -> None:
        """Let go of the file, as soon as nobody has records of it any more."""
        with contextlib.suppress(BufferError):
            self._words.release()
            self._map.close()

    def lines(self, last: int | None = None) -> Iterator[bytes]:
        """The lines in their order, as the text file would have them; only from the newest `last` records, if given.

        The last line of a thread that is older than all others comes first.
        """
        records = self.records(last)
        yield self.header
        inside = {record >> layout.THREAD_SHIFT & 1023 for record in records}
        old = [record for index, record in enumerate(self._last()) if record and index not in inside]
        context: tuple[int, int] | None = None
        gone = self._oldest_value(records)
        start = next((self._tick(record) for record in records if record), 0)
        for index, record in enumerate(chain(sorted(old, key=self._tick), records)):
            if index >= len(old) and (not record or self._tick(record) + 2 < start):
                continue  # of a thread that was killed before its store: empty, or from the lap before
            ref = record & layout.REFS
            thread = record >> layout.THREAD_SHIFT & 1023
            entry = None if ref >= layout.VALUES and index - len(old) < gone else self.text(ref)
            text, own, timed = entry or (b"(a text that was overwritten)", 0, True)
            frame = own or (ref if not timed else 0)
            if own and (thread, own) != context:
                call = self.text(own)
                if call is not None:
                    yield self._before(record, thread, False) + call[0]
            if frame:
                context = (thread, frame)
            yield self._before(record, thread, timed) + text

    def records(self, last: int | None = None) -> Records:
        """The newest `last` records, or all, oldest first; `first` is the number of the oldest since the start then."""
        newest = self._newest()
        held = self._count if self.is_full else newest + 1
        count = held if last is None else min(last, held)
        first = (newest + 1 - count) % self._count
        until = min(count, self._count - first)
        head = int.from_bytes(self._map[layout.HEAD_AT : layout.HEAD_AT + 8], "little") & _MOST_RECORDS
        self.first = head + (newest - head) % self._count - count + 1
        return Records(self._words[first : first + until], self._words[: count - until])

    @property
    def is_full(self) -> bool:
        """Whether the ring went round, so that its first lines are gone."""
        return self._slot(self._count - 1) != 0

    def main_text(self, records: Iterable[int]) -> bytes:
        """The texts of the first thread in these records, each on a line, without calls shown again."""
        texts = self._plain
        if len(texts) > 200_000:
            texts.clear()  # values without end
        return b"".join([texts[word & layout.REFS] for word in records if not word & _THREAD and word])

    def call_of(self, record: int) -> bytes | None:
        """The call that a record is in."""
        entry = self.text(record & layout.REFS)
        own = self.text(entry[1]) if entry is not None and entry[1] else None
        return own[0].strip() if own is not None else None

    def counts(self) -> Iterator[tuple[bytes, int]]:
        """The texts of all records of all threads, and how often each is there."""
        for ref, times in Counter(map(layout.REFS.__and__, self.records())).items():
            entry = self.text(ref)
            if entry is not None:
                yield entry[0], times

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
        record: int = int.from_bytes(self._bytes(index % self._count, 1), "little")
        return record

    def _newest(self) -> int:
        """The slot of the newest record: at the head, or a little behind it if a thread died before it said so.

        The records of the lap before are older by all the time that a lap takes, 20 ms or more.
        """
        at: int = int.from_bytes(self._map[layout.HEAD_AT : layout.HEAD_AT + 8], "little") % self._count
        found, newest = at, self._tick(self._slot(at))
        for step in range(1, 65):
            record = self._slot(at + step)
            if record and self._tick(record) >= newest - 4:
                found = (at + step) % self._count
        return found

    def _tick(self, record: int) -> int:
        return ((record >> 32) - self._started) & 0xFFFF_FFFF

    def _before(self, record: int, thread: int, timed: bool) -> bytes:
        words = [b"%d " % self.pid] if self._flags & layout.LOG_PID else []
        if timed and self._flags & layout.TIMING:
            words.append(clock(int(self.seconds(record))).encode() + b" ")
        if self._flags & layout.SHOW_THREADS or thread:
            words.append(b"[" + self._name(thread) + b"] ")
        return b"".join(words)

    def _name(self, thread: int) -> bytes:
        if thread not in self._names:
            at = layout.NAMES + thread * layout.NAME_SIZE
            self._names[thread] = self._map[at : at + layout.NAME_SIZE].rstrip(b"\0").replace(b"\n", b" ") or b"?"
        return self._names[thread]

    def text(self, ref: int) -> tuple[bytes, int, bool] | None:
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

    def _oldest_value(self, records: Records) -> int:
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


class Records(Sequence[int]):
    """The records of a ring from the oldest on, where they are: nothing is copied."""

    def __init__(self, *parts: memoryview) -> None:
        self._parts = parts
        self._first = len(parts[0])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[int]:
        return chain(*self._parts)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            first, rest = (
                self._parts[0][start:stop],
                self._parts[1][max(0, start - self._first) : max(0, stop - self._first)],
            )
            return [*first, *rest]
        part, at = (0, index) if index < self._first else (1, index - self._first)
        return int(self._parts[part][at])


_MOST_RECORDS = (1 << 60) - 1  # more is a file that is not what it says
_THREAD = (layout.THREADS - 1) << layout.THREAD_SHIFT


class _Plain(dict[int, bytes]):
    """Ref -> its text as a line."""

    def __init__(self, reader: RingReader) -> None:
        self._reader = reader

    def __missing__(self, ref: int) -> bytes:
        entry = self._reader.text(ref)
        self[ref] = line = (entry[0] if entry else b"?") + b"\n"
        return line


def read_ring(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a ring file in their order, without line ends, as the text file would have them."""
    reader = RingReader(path)
    try:
        yield from reader.lines()
    finally:
        reader.close()
