"""Choosing rows: the first, random ones, or random ones of each label."""

from __future__ import annotations

import difflib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.tiny._sizes import size_text
from mldebug.tiny.dataset._lines import PLACES, spread_rows
from mldebug.tiny.dataset._rows import BadRow, Limits, Meter, Reader, Row, Taken

Take = Callable[[Row], Taken]  # embeds and shrinks; BadRow where a row cannot be used

ROUNDS = 5  # of replacing rows that turn out bad
LABEL_NAMES = (
    "label",
    "labels",
    "cls",
    "class",
    "class_label",
    "target",
    "category",
    "fine_label",
    "coarse_label",
    "y",
)


@dataclass
class Picked:
    """The rows that were chosen from a split, and what there is to say about it."""

    taken: list[Taken]
    meter: Meter
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # rows that could not be used, and why
    covered: dict[str, int] = field(default_factory=dict)  # what cover looked for: kind -> index of the row that has it


def pick_first(reader: Reader, n: int, take: Take, limits: Limits) -> Picked:
    """The first `n` rows that can be used."""
    picked = Picked([], Meter(limits))
    for row in picked.meter.watch(reader.rows()):
        _take(row, take, picked)
        if len(picked.taken) == n:
            break
    return picked


def pick_random(reader: Reader, n: int, take: Take, limits: Limits, rng: random.Random) -> Picked:
    """`n` random rows in the order of the source."""
    picked = Picked([], Meter(limits))
    if reader.count is not None:
        indices, note = reader.sample(n, rng, picked.meter)
        _take_all(reader.fetch(indices), take, picked)
        missing = min(n, reader.count) - len(picked.taken)
        if missing > 0:  # bad rows are replaced, once
            more, _note = reader.sample(n + missing, random.Random(rng.random()), Meter(limits))
            fresh = [index for index in more if index not in set(indices)]
            rng.shuffle(fresh)
            _take_all(reader.fetch(fresh[:missing]), take, picked)
        picked.notes += [note] if note else []
    elif (rows := spread_rows(reader, limits.bytes, rng)) is not None:
        _reservoir(rows, n, take, rng, picked)
        picked.meter.complete = False
        picked.meter.hit = picked.meter.hit or f"the limit of {size_text(limits.bytes)} was reached"
        picked.notes.append(f"random rows come from {PLACES} random places of the files; indices are bytes")
    else:
        _reservoir(reader.rows(), n, take, rng, picked)
    picked.taken.sort(key=lambda row: row.index)
    return picked


def _reservoir(rows: Iterable[Row], n: int, take: Take, rng: random.Random, picked: Picked) -> None:
    """Each usable row stays with the same chance, whatever the number of rows turns out to be."""
    seen = 0
    for row in picked.meter.watch(rows):
        place = seen if seen < n else rng.randrange(seen + 1)
        if place >= n and not row.gap:  # a gap is named in any case
            seen += 1
            continue
        before = len(picked.taken)
        if not _take(row, take, picked):
            continue
        seen += 1
        if before == n:
            picked.taken[place] = picked.taken.pop()


def pick_stratified(reader: Reader, n: int, take: Take, limits: Limits, rng: random.Random, by: str | None) -> Picked:
    """`n` random rows with labels in the proportions of the source, and at least one row of each label."""
    name = by or label_column(reader)
    picked = Picked([], Meter(limits))
    groups: dict[str, list[int]] = defaultdict(list)
    values = reader.column(name, picked.skipped)
    for found, value in values:
        groups[label_text(value)].append(found.index)
        picked.meter.rows += 1
        picked.meter.bytes += found.size
        if picked.meter.full():
            break
    else:
        picked.meter.complete = True
    if by is not None and set(groups) <= {"None"}:
        _refuse_unknown(reader, by)
    shares = _shares({label: len(rows) for label, rows in groups.items()}, n)
    for rows in groups.values():
        rng.shuffle(rows)
    wanted = dict(shares)
    for _round in range(ROUNDS):  # bad rows are replaced by others of their label
        label_of = {
            groups[label].pop(): label for label, share in wanted.items() for _ in range(share) if groups[label]
        }
        before = len(picked.taken)
        _take_all(reader.fetch(label_of), take, picked)
        for row in picked.taken[before:]:
            wanted[label_of[row.index]] -= 1
        if not any(share and groups[label] for label, share in wanted.items()):
            break
    picked.taken.sort(key=lambda row: row.index)
    left = [label for label in groups if not shares.get(label)]
    if left:
        picked.notes.append(
            f"{len(groups)} labels in {name!r} and {n} rows: none of {', '.join(left[:8])}{'...' if left[8:] else ''}"
        )
    picked.notes.append(f"stratified by {name!r}: " + ", ".join(f"{key} {shares[key]}" for key in list(shares)[:12]))
    return picked


def _refuse_unknown(reader: Reader, by: str) -> None:
    columns = list(reader.features) if reader.features is not None else _first_columns(reader)
    if columns and by not in columns and by.split(".", maxsplit=1)[0] not in columns:
        near = difflib.get_close_matches(by, columns, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"there is no column {by!r} to stratify by", f"{hint}the columns are {', '.join(columns)}")


def _shares(counts: dict[str, int], n: int) -> dict[str, int]:
    """How many rows of each label: one each, the rest by the largest remainders, never more than there are."""
    n = min(n, sum(counts.values()))
    order = sorted(counts, key=lambda label: -counts[label])
    shares = {label: 1 for label in order[:n]}
    total = sum(counts.values())
    while sum(shares.values()) < n:
        label = max(
            (label for label in shares if shares[label] < counts[label]),
            key=lambda label: counts[label] * n / total - shares[label],
        )
        shares[label] += 1
    return shares


def label_column(reader: Reader) -> str:
    """The column that holds labels. Where there is none, a UsageError names the columns."""
    features = reader.features
    if features is not None:
        labels = [name for name, feature in features.items() if type(feature).__name__ == "ClassLabel"]
        names = labels + [name for name in LABEL_NAMES if name in features]
        columns = list(features)
    else:
        columns = _first_columns(reader)
        names = [name for name in LABEL_NAMES if name in columns]
    if not names:
        raise UsageError("there is no column of labels to stratify by", f"--by COLUMN: {', '.join(columns)}")
    return str(names[0])


def _first_columns(reader: Reader) -> list[str]:
    for row in reader.rows():
        try:
            return list(row.load())
        except BadRow:
            continue
    return []


def label_text(value: Any) -> str:
    """A label as a key: bytes of a tar member and numbers alike become text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace").strip()
    return str(value)


def _take_all(rows: Iterable[Row], take: Take, picked: Picked) -> None:
    for row in rows:
        _take(row, take, picked)


def _take(row: Row, take: Take, picked: Picked) -> bool:
    try:
        picked.taken.append(take(row))
        return True
    except BadRow as exc:
        picked.skipped.append(str(exc))
        return False
