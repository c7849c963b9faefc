"""Which rows are asked for of a source, and taking them."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._sizes import parse_bytes
from mldebug.tiny._stop import Stop
from mldebug.tiny.dataset._cover import pick_cover
from mldebug.tiny.dataset._media import Shrinker
from mldebug.tiny.dataset._pick import Picked, pick_first, pick_random, pick_stratified
from mldebug.tiny.dataset._report import SplitFacts
from mldebug.tiny.dataset._rows import Limits, Reader, Row, Taken
from mldebug.tiny.dataset._source import Opened, open_source
from mldebug.tiny.dataset._tar import TarReader, decoded
from mldebug.tiny.dataset._write import check_sample

WAYS = ("first", "random", "stratified", "cover")


@dataclass(frozen=True)
class Choice:
    """What `tiny_dataset` and `unpack` are asked for. What cannot be meant is a UsageError."""

    n: int
    rows: str
    seed: int
    by: str | None
    side: int
    skip_bad: bool
    limits: Limits

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UsageError(f"a dataset of {self.n} rows", "-n takes a number of 1 or more")
        if self.rows not in WAYS:
            raise UsageError(f"there is no way {self.rows!r} to choose rows", f"choose {', '.join(WAYS)}")
        if self.side < 1:
            raise UsageError(f"pictures of {self.side} pixels", "--side takes a number of 1 or more")

    def pick(self, opened: Opened, name: str) -> Picked:
        """Rows of the split `name`."""
        reader, limits = opened.splits[name], self.limits
        shrinker = Shrinker(reader.features, self.side, opened.root)
        with limits.stop or contextlib.nullcontext():
            picked = self._picked(reader, shrinker, random.Random(f"{self.seed} {name}"))
        if limits.stop is not None and limits.stop.asked and not picked.taken:
            raise KeyboardInterrupt
        if picked.skipped and picked.taken and not self.skip_bad:  # where none is left, the error is another one
            hint = "mend the source, or give --skip-bad (skip_bad=True): bad rows are then named, and others taken"
            raise MldebugError(f"a row cannot be read: {_first_of(picked.skipped)}", hint)
        picked.notes += [f"{text} ({times} times)" for text, times in shrinker.notes.items()]
        return picked

    def _picked(self, reader: Reader, shrinker: Shrinker, rng: random.Random) -> Picked:
        of_tar = isinstance(reader, TarReader)
        take = _take_sample(shrinker) if of_tar else shrinker.take
        if self.rows == "first":
            return pick_first(reader, self.n, take, self.limits)
        if self.rows == "random":
            return pick_random(reader, self.n, take, self.limits, rng)
        if self.rows == "stratified":
            return pick_stratified(reader, self.n, take, self.limits, rng, self.by)
        return pick_cover(reader, self.n, take, self.limits, shrinker, decoded if of_tar else None)

    def facts(self, picked: Picked, count: int | None) -> SplitFacts:
        """What to report of a split whose source has `count` rows, where that is known."""
        meter = picked.meter
        notes = list(picked.notes)
        if self.rows != "first" and not meter.complete:
            of = "the other rows" if count is None else f"{max(0, count - meter.rows):,} more rows"
            notes.append(f"not seen: {of}, as {meter.hit} after {meter.rows:,} rows")
        elif meter.hit and len(picked.taken) < self.n and not meter.complete:
            notes.append(f"{meter.hit} before {self.n} rows were found")
        elif len(picked.taken) < self.n and self.rows != "cover":
            notes.append(f"the source has no more than {len(picked.taken):,} rows that can be used")
        return SplitFacts(
            rows=len(picked.taken),
            seen=meter.rows,
            complete=meter.complete,
            bytes=0,
            indices=tuple(row.index for row in picked.taken),
            covered=picked.covered,
            skipped=tuple(dict.fromkeys(picked.skipped)),
            notes=tuple(notes),
        )


def limits_for(
    rows: str,
    max_rows: int | None = None,
    max_bytes: int | str | None = None,
    max_seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Limits:
    """Those that were given, and for all but the first rows the usual ones."""
    if min(limit for limit in (max_rows, max_seconds, 1) if limit is not None) <= 0:
        raise UsageError("a limit of 0 lets no row through", "give --max-rows and --max-seconds above 0")
    most = parse_bytes("--max-bytes", max_bytes)
    usual = Limits(sys.maxsize, sys.maxsize, math.inf) if rows == "first" else Limits()
    return Limits(max_rows or usual.rows, most or usual.bytes, max_seconds or usual.seconds, Stop(), progress)


def opened_source(source: Any, config: str | None, offline: bool | None) -> Opened:
    try:
        return open_source(source, config=config, offline=offline)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot read {source}: {reason}", "check its permissions") from exc


def chosen_splits(opened: Opened, splits: str | Sequence[str] | None) -> list[str]:
    if splits is None:
        return list(opened.splits)
    splits = [splits] if isinstance(splits, str) else splits
    for name in splits:
        if name not in opened.splits:
            raise UsageError(f"{opened.name} has no split {name!r}", f"its splits: {', '.join(opened.splits)}")
    return list(dict.fromkeys(splits))


def no_rows(opened: Opened, facts: dict[str, SplitFacts]) -> MldebugError:
    """The error of a source of which nothing is left."""
    skipped = [text for fact in facts.values() for text in fact.skipped]
    if skipped:
        return MldebugError(f"{opened.name} has no row that can be used: {_first_of(skipped)}", "mend the source first")
    return MldebugError(f"{opened.name} has no rows", "give a source that is not empty")


def _first_of(skipped: list[str]) -> str:
    first, *others = dict.fromkeys(skipped)
    return f"{first} (and {len(others)} more)" if others else first


def _take_sample(shrinker: Shrinker) -> Any:
    def take(row: Row) -> Taken:
        values = row.load()
        check_sample(values, row.where)
        return shrinker.take_sample(row, values)

    return take
