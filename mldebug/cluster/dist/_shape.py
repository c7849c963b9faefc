"""Evidence of a file, value by value: what is not as it has to be is left out, so that judging it cannot fail."""

from __future__ import annotations

import math
from typing import Any

_LARGEST = 1 << 63


class _Maybe:
    def __init__(self, shape: Any) -> None:
        self.shape = shape


# A type; [shape] a list of any length; (shape, ...) a list of that length; {name: shape}, where "*" is any other name.
_STRINGS = {"*": str}
_ERROR = {"type": str, "message": str, "after": float}
_DEVICE = {"kind": str, "index": _Maybe(int), "visible": int, "memory": int, "*": str}
_NO_DEVICE = {"kind": "cpu", "index": None, "uuid": "", "name": "", "numa_node": "", "local_cpulist": ""}
_RANK = {
    "rank": int, "local_rank": int, "host": str, "boot": str, "pid": int, "parent": int, "phase": str, "step": int,
    "age": float, "state": str, "parent_state": str, "silent": float, "lost": str, "code": _Maybe(int),
    "error": _Maybe(_ERROR), "done": bool, "stack": str, "no_stack": str,
    "local_world": int, "apart": (str, str), "skew": _Maybe(float), "waits": bool, "address": str, "terminated": float,
    "reach": [(int, str, str, int, str)], "large": [(int, str, str, int, float)],
    "checks": {"*": {"bytes": int, "to_GBps": float, "*": _Maybe(float)}},
    "facts": {
        "device": _DEVICE,
        "interfaces": {"*": {"addresses": [str], "mtu": int, "state": str}},
        "hostname": {"name": str, "addresses": [str]},
        "environment": _STRINGS, "topology": _STRINGS, "door": (str, int),
        "libraries": [str], "infiniband": [str], "plugins": [str], "nccl_conf": [str], "master": [str], "cpus": [int],
        "shm": int, "memlock": int, "time": float, "store": _Maybe(int), "*": str,
    },
}  # fmt: skip
_WRONG = {
    "rank": int, "check": str, "source": _Maybe(int), "count": int, "of": int, "index": int, "got": float,
    "want": float,
}  # fmt: skip
_CLASH = {"rank": int, "host": str, "pid": int, "why": str}
_EVIDENCE = {
    "world": int, "backend": str, "timeout": float, "ended": str, "seconds": float, "missing_why": str,
    "missing_for": float, "collector": {"host": str, "pid": int, "port": int, "address": str}, "ranks": {"*": _RANK},
    "clashes": [_CLASH], "hosts": _STRINGS, "plan": _STRINGS, "wrong": [_WRONG], "left_out": [(str, str)],
}  # fmt: skip
# What has to be whole: a part of it says nothing.
_WHOLE = (_WRONG, _CLASH, _ERROR, _RANK["facts"]["interfaces"]["*"], _RANK["facts"]["hostname"])  # type: ignore[index]


class _Unfit(Exception):
    pass


def fitting(evidence: dict[str, Any]) -> dict[str, Any]:
    """The parts of evidence that are of the right types."""
    found: dict[str, Any] = _fit(evidence, _EVIDENCE)
    return found


def _fit(value: Any, shape: Any) -> Any:
    if isinstance(shape, _Maybe):
        return None if value is None else _fit(value, shape.shape)
    if isinstance(shape, dict):
        return _fit_names(value, shape)
    if isinstance(shape, list):
        return [one for item in _checked(value, list) for one in _one(item, shape[0])]
    if isinstance(shape, tuple):
        if len(_checked(value, list)) != len(shape):
            raise _Unfit
        return [_fit(item, one) for item, one in zip(value, shape, strict=True)]
    if shape is float:
        return _number(value)
    if shape is int and (isinstance(value, bool) or (isinstance(value, int) and abs(value) >= _LARGEST)):
        raise _Unfit
    return _checked(value, shape)


def _fit_names(value: Any, shape: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in _checked(value, dict).items():
        one = shape.get(name, shape.get("*"))
        for fit in _one(item, one) if one is not None else ():
            found[name] = fit
    if any(shape is whole for whole in _WHOLE) and len(found) < len(shape):
        raise _Unfit
    return {**_NO_DEVICE, **found} if shape is _DEVICE else found


def _one(value: Any, shape: Any) -> list[Any]:
    """The value in a list, or an empty one."""
    try:
        return [_fit(value, shape)]
    except _Unfit:
        return []


def _number(value: Any) -> float:
    if value in ("nan", "inf", "-inf"):  # as the JSON of a report has them
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) >= 1e300 or math.isnan(value):
        raise _Unfit
    return value


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Unfit
    return value
