"""Equal lines of many ranks become one with the set of them, within a window that bounds the memory."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable

from mldebug.ranks._logs_normal import ADDRESS, normal
from mldebug.ranks._logs_source import Source

_ENTRIES = 100_000  # different lines that may wait for their equals
_BYTES = 48 << 20
_LONG = 4096  # bytes of a longer line that are kept; the rest counts by its hash
_TIME = b"<time>"
_REPEATS = 16  # the same line again from the same rank: so many of them are told apart by order


class Entry:
    """A line, and who printed it. `text` is as the first of them printed it."""

    __slots__ = ("differs", "key", "line", "mask", "next", "size", "text", "times")

    def __init__(self, text: bytes, key: bytes, mask: int, line: int, size: int) -> None:
        self.text = text
        self.key = key
        self.mask = mask  # a bit for each source
        self.line = line
        self.size = size
        self.differs = 0  # what differs between those who printed it
        self.times = 0  # how often more the same source said it, where order no longer tells
        self.next: Entry | None = None


class Window:
    """Takes lines one by one and hands each folded line to `out`, in the order of their first appearance."""

    def __init__(self, out: Callable[[Entry], None]) -> None:
        self._out = out
        self._queue: deque[Entry] = deque()
        self.known: dict[bytes, Entry] = {}  # by what is left of a line without what follows from the rank
        self.timed: dict[bytes, Entry] = {}  # those that begin with a time, by the rest
        self._bytes = 0
        self.folded = 0

    def add(self, text: bytes, source: Source, line: int) -> None:
        bit = source.bit
        size = len(text)
        if size > _LONG:
            digest = hashlib.blake2b(text, digest_size=6).hexdigest().encode()
            text = b"%s ... (%d bytes, %s)" % (text[:_LONG], size, digest)
            size = _LONG
        key, differs = normal(text, source.rank, source.local)
        entry = self.known.get(key)
        if entry is not None:
            tries = 0
            while entry.mask & bit:
                if tries == _REPEATS or source.nobody:
                    entry.times += 1
                    return
                if entry.next is None:
                    entry.next = self._new(text, key, bit, line, size)
                    return
                entry = entry.next
                tries += 1
            entry.mask |= bit
            if entry.text != text:
                entry.differs |= differs
            return
        entry = self._new(text, key, bit, line, size)
        self.known[key] = entry
        if key.startswith(_TIME):
            self.timed[key[len(_TIME) :]] = entry

    def reserve(self, source: Source, line: int) -> Entry:
        """A place for a line that is known later; `settle` fills it."""
        return self._new(b"", b"", source.bit, line, 0)

    def settle(self, entry: Entry, text: bytes, key: bytes) -> None:
        """Fill a reserved place, or give it up where an equal line has one already."""
        known = self.known.get(key)
        if known is None:
            entry.text, entry.key = text, key
            self.known[key] = entry
            return
        known.differs |= ADDRESS if known.text != text else 0
        known.times += bool(known.mask & entry.mask)
        known.mask |= entry.mask

    def _new(self, text: bytes, key: bytes, bit: int, line: int, size: int) -> Entry:
        entry = Entry(text, key, bit, line, size)
        self._queue.append(entry)
        self._bytes += size
        if len(self._queue) > _ENTRIES or self._bytes > _BYTES:
            self._let_go(self._queue.popleft())
        return entry

    def _let_go(self, entry: Entry) -> None:
        self._bytes -= entry.size
        if self.known.get(entry.key) is entry:
            timed = entry.key.startswith(_TIME)
            if entry.next is not None:
                self.known[entry.key] = entry.next
                if timed:
                    self.timed[entry.key[len(_TIME) :]] = entry.next
            else:
                del self.known[entry.key]
                if timed:
                    self.timed.pop(entry.key[len(_TIME) :], None)
        if entry.text:
            self.folded += 1
            self._out(entry)

    def finish(self) -> None:
        while self._queue:
            self._let_go(self._queue.popleft())


def rank_set(numbers: Iterable[int]) -> str:
    """`0-6,8-63` for a set of numbers."""
    parts: list[str] = []
    start = last = None
    for number in [*sorted(set(numbers)), None]:
        if last is not None and number == last + 1:
            last = number
            continue
        if start is not None:
            parts.append(str(start) if start == last else f"{start}-{last}")
        start = last = number
    return ",".join(parts)
