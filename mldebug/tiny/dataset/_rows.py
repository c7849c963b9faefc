"""What every kind of source gives: rows that are loaded when they are looked at, and a meter of what was read."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mldebug.tiny._sizes import size_text
from mldebug.tiny._stop import Stop

# What reading a file that is corrupt may raise: the errors of Arrow are of all these kinds.
READ_ERRORS = (OSError, EOFError, ValueError, TypeError, LookupError, NotImplementedError, MemoryError)


class BadRow(Exception):
    """A row that cannot be used. The text says where it is and what is wrong with it."""


@dataclass
class Row:
    """One row of a source. `load` gives its values and raises BadRow where they cannot be had.

    `where` is for people: a file with a line or a row. `size` is about what reading it took, in bytes. `table` gives
    the row as an Arrow table of its own where the source is one, so that types pass through untouched.
    """

    index: int
    where: str
    load: Callable[[], Mapping[str, Any]]
    size: int = 0
    table: Callable[[], Any] | None = None
    gap: bool = False  # stands for a part of a source that cannot be read, not for a row


@dataclass
class Taken:
    """A row of the result: its values, with pictures and sounds embedded and made small."""

    index: int
    where: str
    values: dict[str, Any]
    table: Any = None  # in place of values, where the source is a table


class Reader(ABC):
    """One split of a source. Readers with random access know their `count`."""

    features: Any = None  # datasets.Features, where they are known before a row is read
    count: int | None = None

    @abstractmethod
    def rows(self) -> Iterator[Row]:
        """All rows in order, a few of them in memory at a time."""

    def fetch(self, indices: Iterable[int]) -> Iterator[Row]:
        """The rows with these indices, in order."""
        wanted = set(indices)
        last = max(wanted, default=-1)
        for row in self.rows():
            if row.index in wanted and not row.gap:
                yield row
            if row.index >= last:
                return

    def sample(self, n: int, rng: Any, meter: Meter) -> tuple[list[int], str]:
        """`n` random indices and a note on how they were drawn. Only for readers that know their `count`."""
        count = self.count or 0
        meter.rows, meter.complete = count, True
        return sorted(rng.sample(range(count), min(n, count))), ""

    def column(self, name: str, bad: list[str]) -> Iterator[tuple[Row, Any]]:
        """Each row with one of its values; a dotted name reaches into structs. What is wrong with bad rows goes into
        `bad`."""
        for row in self.rows():
            try:
                value = at(row.load(), name)
            except BadRow as exc:
                bad.append(str(exc))
            else:
                yield row, value

    def table(self, taken: list[Taken]) -> Any:
        """The rows as an Arrow table, where the source has rules of its own for that."""
        return None


def at(values: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside it by a dotted name."""
    if name in values:
        return values[name]
    value: Any = values
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


@dataclass(frozen=True)
class Limits:
    """How much of a source is looked at, at most, to choose rows."""

    rows: int = 1_000_000
    bytes: int = 1 << 30
    seconds: float = 30.0
    stop: Stop | None = None
    progress: Callable[[str], None] | None = None  # called about twice a second


@dataclass
class Meter:
    """Counts what was looked at, and says when a limit is reached."""

    limits: Limits
    rows: int = 0
    bytes: int = 0
    hit: str = ""
    complete: bool = False  # the source ended before a limit
    _start: float = field(default_factory=time.monotonic)
    _shown: float = field(default_factory=time.monotonic)

    def watch(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows until a limit is reached."""
        for row in rows:
            if not row.gap:
                self.rows += 1
                self.bytes += row.size
            yield row
            if self.full():
                return
        self.complete = True

    def full(self) -> bool:
        """Whether a limit is reached; `hit` says which."""
        limits, now = self.limits, time.monotonic()
        if limits.stop is not None and limits.stop.asked:
            self.hit = "it was interrupted"
        elif self.rows >= limits.rows:
            self.hit = f"the limit of {limits.rows:,} rows was reached"
        elif self.bytes >= limits.bytes:
            self.hit = f"the limit of {size_text(limits.bytes)} was reached"
        elif now - self._start >= limits.seconds:
            self.hit = f"the limit of {limits.seconds:g} s was reached"
        if limits.progress is not None and now >= self._shown + 0.5:
            self._shown = now
            limits.progress(f"looked at {self.rows:,} rows, {size_text(self.bytes)}")
        return bool(self.hit)
