"""What tiny_model returns, and the line about its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.report import Report, jsonable, paint
from mldebug.tiny._report import Check, holds, layout


@dataclass(frozen=True)
class TinyModelReport(Report):
    """A tiny model: itself, where it was written, and the checks that it went through.

    `changes` maps each field of the config that was changed to its old and new value; `seconds` is the time in all,
    and `times` says what it went to.
    """

    source: str
    path: Path | None
    architecture: str
    model: Any = field(repr=False)  # the reports of a notebook's cells would be pages long
    checks: Mapping[str, Check] = field(repr=False)
    params: int
    bytes: int
    dtype: str
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    times: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """Whether no check failed. `ok` of a check is None where it does not apply."""
        return holds(self.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values; `checks` maps the name of a check to ok and why. The model is left out."""
        return {
            "schema": self.schema,
            "ok": self.ok,
            "source": self.source,
            "path": None if self.path is None else str(self.path),
            "architecture": self.architecture,
            "checks": {name: {"ok": check.ok, "why": check.why} for name, check in self.checks.items()},
            "params": self.params,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "changes": {path: [jsonable(old), jsonable(new)] for path, (old, new) in self.changes.items()},
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "times": {name: round(seconds, 3) for name, seconds in self.times.items()},
        }

    def text(self, color: bool = False, width: int = 80) -> str:
        """The report for people: what was made, one line for each check, and where the time went."""
        where = "not kept, as no folder was given" if self.path is None else str(self.path)
        rows = [
            ("source", f"{self.source}: {self.architecture}"),
            ("result", f"{where}: {self.params:,} parameters, {_size(self.bytes)}, {self.dtype}"),
            (
                "changed",
                ", ".join(f"{path} {_short(old)} -> {_short(new)}" for path, (old, new) in self.changes.items())
                or "nothing",
            ),
        ]
        words = {True: "ok", False: "FAIL", None: "-"}
        rows += [(f"{words[check.ok]:<4} {name}", check.why) for name, check in self.checks.items()]
        rows += [("note", note) for note in self.notes]
        rows.append(("time", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.times.items())))
        text = layout(rows, width)
        return paint(text) if color else text


def _short(value: Any) -> str:
    text = str(value)
    return (
        text
        if len(text) <= 40
        else f"[{len(value)} items]"
        if isinstance(value, (list, tuple, dict))
        else f"{text[:37]}..."
    )


def _size(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def budget_check(model: Any, size: int, limit: int, changes: Mapping[str, tuple[Any, Any]]) -> Check:
    """Whether the weights fit; where they do not, the largest tensors with the config fields behind their sides."""
    if size <= limit:
        return Check("budget", True, f"{_size(size)} of {_size(limit)}")
    fields = _fields(model.config.to_dict(), changes)
    largest = sorted(model.named_parameters(), key=lambda item: -item[1].numel() * item[1].element_size())[:3]
    shown = [
        f"{name} {'x'.join(map(str, tensor.shape))} "
        f"({_size(tensor.numel() * tensor.element_size())}: {_sides(tensor.shape, fields)})"
        for name, tensor in largest
    ]
    return Check("budget", False, f"{_size(size)} is over {_size(limit)}. The largest: {'; '.join(shown)}")


def _fields(config: Mapping[str, Any], changes: Mapping[str, tuple[Any, Any]]) -> dict[int, list[str]]:
    """The sizes of a config: value -> the fields that have it. Those that were shrunk come first."""
    from mldebug.tiny.model.inputs._facts import walk

    found: dict[int, list[str]] = {}
    for path, key, value in sorted(walk(dict(config)), key=lambda item: (item[0] not in changes, item[0].count("."))):
        sized = (
            isinstance(value, int) and not isinstance(value, bool) and value > 1 and not key.endswith(("_id", "_index"))
        )
        if sized and not key.startswith(("id2label", "max_length")):
            found.setdefault(value, []).append(path)
    return found


def _sides(shape: Any, fields: Mapping[int, list[str]]) -> str:
    return " x ".join(_side(int(side), fields) for side in shape)


def _side(side: int, fields: Mapping[int, list[str]]) -> str:
    """The field that is this long, or the product of two fields that is."""
    if side in fields:
        return " or ".join(fields[side][:2])
    for value, paths in sorted(fields.items(), reverse=True):
        if side % value == 0 and side // value in fields:
            return f"{paths[0]}*{fields[side // value][0]}"
    near = [value for value in fields if 0 < side - value <= 4]
    return f"{fields[max(near)][0]} + {side - max(near)}" if near else str(side)
