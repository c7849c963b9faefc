"""What evidence from a file or from another node must look like: what is not so is left out, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_RANKS = 1_000_000

# A shape is int, float, str, bool or "rank" (a rank or None), [shape] for a list, {str: shape} for a mapping, or a
# mapping of keys, of which those with "?" may be missing.
LOCK = {"pid": int, "kind": str, "inode": str, "waits": bool, "file?": str}
PIPE = {"fd": int, "inode": str, "write": bool}
COMMUNICATOR = {"name": str, "size": int, "rank": int, "status": str, "issued?": [{str: int}]}
GPU = {"index": int, "busy": [int]}
GROUPS = {str: {"desc": str, "ranks": ["rank"]}}
SOURCE = {"text": str, "guards": [str], "steps": [{"line": int, "what": str, "guards": [str]}]}

# What travels of a rank, a child, a sample and a thread beside samples and stacks, which have a form of their own.
RANK = {
    "rank": "rank", "local_rank": "rank", "world_size": "rank", "pid": int, "start": float, "job": str,
    "command": str, "status": str, "why?": str, "state": str, "locks": [LOCK], "pipes?": [PIPE],
    "local_world_size?": "rank", "user?": str, "nccl?": [COMMUNICATOR], "gpus?": [GPU],
    "progress?": {"step?": [int], "heartbeat?": [int]},
}  # fmt: skip
CHILD = {
    "pid": int, "parent": int, "command": str, "kind": str, "state": str, "why?": str, "pipes?": [PIPE],
}  # fmt: skip
SAMPLE = {"woke?": [int], "io?": [int]}
THREAD = {"switches?": int, "io?": int}

# A whole document, as in a file.
FRAME = {"name": str, "file": str, "line": int, "locals?": [{"name": str, "repr": str, "arg": bool}]}
WHOLE_THREAD = {
    "name": str, "tid": int, "active": bool, "gil": bool, "frames": [FRAME], "ticks?": int, **THREAD,
}  # fmt: skip
WHOLE_SAMPLE = {
    "time": float, "state": str, "ticks": int, "threads": [WHOLE_THREAD], "wchan?": str, **SAMPLE,
}  # fmt: skip
CALL = {
    "group": str, "seq": int, "op": str, "done": bool, "sizes?": [[int]], "frames?": [FRAME], "p2p?": bool,
}  # fmt: skip
EVIDENCE = {
    "schema": int, "time": float, "hosts": [{"host": str, "status": str, "why?": str}], "notes": [str],
    "source?": {str: SOURCE},
    "ranks": [
        {
            **RANK, "host": str, "samples": [WHOLE_SAMPLE], "children": [{**CHILD, "samples": [WHOLE_SAMPLE]}],
            "native?": [WHOLE_THREAD], "record?": {"calls": [CALL], "whole": bool, "groups?": GROUPS},
        }
    ],
}  # fmt: skip


class Unreadable(ValueError):
    """A document that is no evidence; the message says what is wrong."""


def fit(value: Any, shape: Any, text: Callable[[Any], str]) -> Any:
    """`value` as the shape says, with all of its strings made by `text`; raises Unreadable where it does not fit."""
    if shape is str:
        return text(value)
    if shape is int:
        if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
            raise Unreadable(f"{str(value)[:40]!r} is no whole number")
        return value
    if shape is float:
        if type(value) not in (int, float) or not abs(value) < 1e12:
            raise Unreadable(f"{str(value)[:40]!r} is no number")
        return float(value)
    if shape is bool:
        if type(value) is not bool:
            raise Unreadable(f"{str(value)[:40]!r} is not true or false")
        return value
    if shape == "rank":
        if value is not None and not (type(value) is int and 0 <= value <= MOST_RANKS):
            raise Unreadable(f"{str(value)[:40]!r} is no rank")
        return value
    if type(shape) is list:
        if type(value) is not list:
            raise Unreadable(f"{str(value)[:40]!r} is no list")
        return [fit(one, shape[0], text) for one in value]
    if type(value) is not dict:
        raise Unreadable(f"{str(value)[:40]!r} is no object")
    if str in shape:
        return {text(key): fit(one, shape[str], text) for key, one in value.items()}
    found = {}
    for key, inner in shape.items():
        name = key.rstrip("?")
        if name in value:
            found[name] = fit(value[name], inner, text)
        elif name == key:
            raise Unreadable(f"{name} is missing")
    return found


def check(document: Any) -> None:
    """Raises Unreadable where a document from a file is no evidence."""
    fit(document, EVIDENCE, _string)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"{str(value)[:40]!r} is no text")
    return value


def cut(value: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """The entries that the shape has a place for."""
    return {name: value[name] for name in (key.rstrip("?") for key in shape) if name in value}
