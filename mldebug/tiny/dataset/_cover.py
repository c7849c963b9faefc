"""Choosing rows that cover what is odd: at least one of each kind of value that breaks code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mldebug.tiny.dataset._media import BadMedia, Shrinker, image_facts, looks_like_image, media_kind
from mldebug.tiny.dataset._pick import LABEL_NAMES, Picked, Take, label_text
from mldebug.tiny.dataset._rows import BadRow, Limits, Meter, Reader, Taken

MOST_LABELS = 32  # distinct values of a column that is not known to hold labels


View = Callable[[Mapping[str, Any], str], Mapping[str, Any]]


def pick_cover(
    reader: Reader, n: int, take: Take, limits: Limits, shrinker: Shrinker, view: View | None = None
) -> Picked:
    """Rows such that each kind of oddity is there, and the first rows of the source where there is room for more.

    `view` turns the values of a row into what its user sees, such as the bytes of a text into the text.
    """
    picked = Picked([], Meter(limits))
    search = _Search(take, picked)
    facts = _Facts(shrinker, reader.features)
    filler: list[Taken] = []
    for row in picked.meter.watch(reader.rows()):
        try:
            values = row.load()
            found = list(facts.of(values if view is None else view(values, row.where)))
        except BadRow as exc:
            picked.skipped.append(str(exc))
            continue
        taken = search.see(row, found)
        if len(filler) < n:
            try:
                filler.append(taken or take(row))
            except BadRow as exc:
                picked.skipped.append(str(exc))  # the search may have named it already: it is said once
    kinds = search.kinds(picked.meter.rows)
    chosen, left = _cover(kinds, search, n)
    for spare in filler:
        if len(chosen) == n:
            break
        chosen.setdefault(spare.index, spare)
    picked.taken = [chosen[index] for index in sorted(chosen)]
    picked.covered = {kind: index for kind, index in kinds.items() if kind not in left}
    if left:
        picked.notes.append(f"{n} rows have no room for: {', '.join(left[:12])}{' ...' if left[12:] else ''}")
    picked.notes += facts.unseen(kinds)
    return picked


class _Search:
    """The row that stands for each kind so far."""

    def __init__(self, take: Take, picked: Picked) -> None:
        self.take, self.picked = take, picked
        self.best: dict[str, tuple[float, int]] = {}  # kind -> its score and the row's index
        self.values: dict[str, dict[str, int]] = {}  # column that may hold labels -> value -> row
        self.rows: dict[int, Taken] = {}
        self.has: dict[int, set[str]] = {}  # row -> the kinds that need no comparison with other rows

    def see(self, row: Any, found: list[tuple[str, float | None, str | None]]) -> Taken | None:
        """Keep the row if it is the first of a kind, or the shortest or longest."""
        better = [(kind, score) for kind, score, value in found if value is None and self._improves(kind, score)]
        fresh = [(kind, value) for kind, _score, value in found if value is not None and self._is_new(kind, value)]
        if not better and not fresh:
            return None
        try:
            taken = self.rows.get(row.index) or self.take(row)
        except BadRow as exc:
            self.picked.skipped.append(str(exc))
            return None
        self.rows[row.index] = taken
        self.has[row.index] = {
            kind if value is None else f"{kind} = {value}" for kind, score, value in found if score is None
        }
        for kind, score in better:
            self.best[kind] = (0.0 if score is None else score, row.index)
        for kind, value in fresh:
            self.values[kind][value] = row.index
        if len(self.rows) > 64:
            self._forget()
        return taken

    def _improves(self, kind: str, score: float | None) -> bool:
        return kind not in self.best or (score is not None and score > self.best[kind][0])

    def _is_new(self, kind: str, value: str) -> bool:
        seen = self.values.setdefault(kind, {})
        return value not in seen and len(seen) <= MOST_LABELS

    def _forget(self) -> None:
        used = {index for _score, index in self.best.values()}
        for column, seen in self.values.items():
            if len(seen) > MOST_LABELS:  # no column of labels
                self.values[column] = dict.fromkeys(list(seen), -1)
            else:
                used.update(seen.values())
        self.rows = {index: row for index, row in self.rows.items() if index in used}

    def kinds(self, rows: int) -> dict[str, int]:
        kinds = {kind: index for kind, (_score, index) in self.best.items()}
        for column, seen in self.values.items():
            if len(seen) <= MOST_LABELS and 2 * len(seen) <= rows:
                kinds |= {f"{column} = {value}": index for value, index in seen.items()}
        return {kind: index for kind, index in kinds.items() if index in self.rows}


def _cover(kinds: Mapping[str, int], search: _Search, n: int) -> tuple[dict[int, Taken], list[str]]:
    """At most `n` rows that have as many of the kinds as can be, greedily, and the kinds left out."""
    of_row = {index: {kind for kind in search.has[index] if kind in kinds} for index in search.rows}
    for kind, index in kinds.items():
        of_row[index].add(kind)
    left, chosen = set(kinds), dict[int, Taken]()
    while left and len(chosen) < n:
        index = min(of_row, key=lambda index: (-len(of_row[index] & left), index))
        chosen[index] = search.rows[index]
        left -= of_row[index]
    return chosen, [kind for kind in kinds if kind in left]


class _Facts:
    """What is to be said about the values of a row: (kind, score or None, value of a possible label or None)."""

    def __init__(self, shrinker: Shrinker, features: Any) -> None:
        self.shrinker, self.features = shrinker, features
        self.names: dict[str, None] = {}

    def of(self, values: Mapping[str, Any]) -> Iterator[tuple[str, float | None, str | None]]:
        for name in self.names:
            if name not in values:
                yield f"{name} is missing", None, None
        if (self.names and any(name not in self.names for name in values)) or "__key__" in values:
            yield f"columns {'+'.join(sorted(name for name in values if name != '__key__'))}", None, None
        for name, value in values.items():
            if name == "__key__":
                continue
            self.names.setdefault(name)
            yield from self._value(name, value, None if self.features is None else self.features.get(name))

    def _value(self, name: str, value: Any, feature: Any) -> Iterator[tuple[str, float | None, str | None]]:
        if value is None:
            yield f"{name} is None", None, None
        elif media_kind(feature) or isinstance(value, bytes) or _is_file(value):
            yield from self._file(name, value, media_kind(feature))
        elif type(feature).__name__ == "ClassLabel":
            yield f"{name} = {_class_name(feature, value)}", None, None
        elif isinstance(value, bool) or (name.rpartition(".")[2] in LABEL_NAMES and isinstance(value, (str, int))):
            yield f"{name} = {label_text(value)[:40]}", None, None
        elif isinstance(value, str):
            yield from self._text(name, value)
        elif isinstance(value, int):
            yield name, None, str(value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}", None, None
        elif isinstance(value, Mapping):
            for key, item in value.items():
                inner = feature.get(key) if isinstance(feature, Mapping) else None
                yield from self._value(f"{name}.{key}", item, inner)
        elif isinstance(value, (list, tuple)):
            yield from self._list(name, value, feature)

    def _text(self, name: str, value: str) -> Iterator[tuple[str, float | None, str | None]]:
        if not value:
            yield f"{name} is empty", None, None
            return
        if value.isspace():
            yield f"{name} is blank", None, None
        if not value.isascii():
            yield f"{name} is not ASCII", None, None
        yield f"{name} is shortest", -len(value), None
        yield f"{name} is longest", len(value), None
        if len(value) <= 40:
            yield name, None, value

    def _list(self, name: str, value: Any, feature: Any) -> Iterator[tuple[str, float | None, str | None]]:
        if not len(value):
            yield f"{name} is empty", None, None
            return
        yield f"{name} is shortest", -len(value), None
        yield f"{name} is longest", len(value), None
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        seen = set()
        for item in value:
            for kind, _score, label in self._value(f"{name}[]", item, inner):
                if label is None and kind not in seen and not kind.endswith(("shortest", "longest")):
                    seen.add(kind)
                    yield kind, None, None

    def _file(self, name: str, value: Any, kind: str | None) -> Iterator[tuple[str, float | None, str | None]]:
        data = value if isinstance(value, bytes) else self._bytes(value)
        if data is None:
            return
        if not data:
            yield f"{name} is empty", None, None
        elif kind == "image" or looks_like_image(data):
            try:
                form, mode = image_facts(data)
            except Exception:
                return  # such a row is named when it is taken
            yield f"{name} is {form} {mode}", None, None
        else:
            yield f"{name} is shortest", -len(data), None
            yield f"{name} is longest", len(data), None

    def _bytes(self, value: Any) -> bytes | None:
        if isinstance(value, str):
            value = {"path": value}
        if value.get("bytes") is not None or not value.get("path"):
            data: bytes | None = value.get("bytes")
            return data
        try:
            return self.shrinker.read(value["path"])
        except BadMedia:
            return None

    def unseen(self, kinds: Mapping[str, int]) -> list[str]:
        """The names of classes that no row had."""
        notes = []
        for name, feature in (self.features or {}).items():
            if type(feature).__name__ == "ClassLabel":
                missing = [label for label in feature.names if f"{name} = {label}" not in kinds]
                if missing:
                    shown = ", ".join(missing[:8]) + (" ..." if missing[8:] else "")
                    notes.append(f"no row was seen with {name} = {shown}")
        return notes


def _is_file(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"bytes", "path"}


def _class_name(feature: Any, value: Any) -> str:
    try:
        return str(feature.int2str(value))
    except (ValueError, TypeError):
        return str(value)
