"""Whether the lines of a recording have what a comparison reads: files are copied, cut and edited."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any, NoReturn

from mldebug.core.errors import MldebugError

_NUMBER = (int, float)
_NONE = type(None)
# What each kind of line must have, with the types that are allowed.
_FIELDS: dict[str, dict[str, Any]] = {
    "run": {"rank": int, "world_size": int},
    "model": {"model": int},
    "weight": {"model": int, "forward": int, "module": str},
    "call": {"model": int, "forward": int, "module": str, "call": int, "class": str, "parent": (int, _NONE)},
    "tensor": {"role": str, "path": str, "of": int},
    "left": {"of": int, "random": (int, _NONE)},
}
_OF_OP: dict[str, Any] = {"op": str, "from": list}
_OF_VALUES: dict[str, Any] = {"shape": list, "dtype": str}
_STATISTICS: dict[str, Any] = {"sample": str, "wide": bool, "rms": _NUMBER, "bits": int}
_OF_SHARD: dict[str, Any] = {"placements": list, "coordinate": list, "offset": list, "local": list, "sums": list}


def check_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """MldebugError that names the first line which lacks something, or has what cannot be."""
    numbers: dict[int, dict[str, Any]] = {}
    for at, line in enumerate(lines, 1):
        _has(path, at, line, _FIELDS.get(line["kind"], {}))
        if line.get("role") == "op":
            _has(path, at, line, _OF_OP)
        if "same" in line:  # an earlier line with values: it cannot lead round in a circle
            same = line["same"]
            if isinstance(same, bool) or not isinstance(same, int) or same >= line["n"]:
                _damaged(path, at, f"has 'same': {same!r:.40}")
            if numbers.get(same, line)["kind"] not in ("tensor", "weight"):
                _damaged(path, at, f"refers to number {same}, which is no tensor")
        elif line["kind"] in ("tensor", "weight"):
            _has(path, at, line, _OF_VALUES)
            _has(path, at, line, {} if line.get("odd") else _STATISTICS)
            _check_values(path, at, line)
        if line["n"] in numbers:
            _damaged(path, at, f"has the number {line['n']} of a line before it")
        numbers[line["n"]] = line


def _check_values(path: Path, at: int, line: dict[str, Any]) -> None:
    if not all(isinstance(size, int) and size >= 0 for size in line["shape"]):
        _damaged(path, at, f"has the shape {line['shape']}")
    if line.get("shard") is not None:
        if not isinstance(line["shard"], dict):
            _damaged(path, at, "has a 'shard' that is no object")
        _has(path, at, line["shard"], _OF_SHARD)
    if line.get("odd"):
        return
    try:
        size = len(base64.b64decode(line["sample"], validate=True))
    except (binascii.Error, ValueError):
        _damaged(path, at, "has a 'sample' that is no base64")
    width = 8 if line["wide"] else 4
    count = None if size % width else size // width
    if count != _expected(line):
        _damaged(path, at, f"has a 'sample' of {size} bytes, which does not fit the shape {line['shape']}")


def _expected(line: dict[str, Any]) -> int:
    from mldebug.numerics.runs._recording_tensor import expected_sample

    if "sampled" in line and isinstance(line["sampled"], list):
        return len(line["sampled"])
    return expected_sample(line["shape"], bool(line.get("complex")))


def _has(path: Path, at: int, line: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kind in fields.items():
        if name not in line:
            _damaged(path, at, f"has no {name!r}")
        value = line[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            _damaged(path, at, f"has {name!r}: {value!r:.40}")


def _damaged(path: Path, at: int, what: str) -> NoReturn:
    raise MldebugError(
        f"{path} is damaged: line {at} {what}", "record the run again, or copy the folder again from where it was made"
    )
