"""Which place of the program a call comes from, and how often it came: what equal calls of several ranks share."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import FrameType
from typing import Any

from mldebug.ranks._world import Who

_counts: dict[str, int] = {}
_lock = threading.Lock()
_INNER = ("mldebug.core.", "mldebug.ranks.", "contextlib")


def count(name: str) -> int:
    """How often this process has asked for that name before."""
    with _lock:
        number = _counts.get(name, 0)
        _counts[name] = number + 1
        return number


def caller() -> FrameType | None:
    """The frame of the user's code that called into us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_INNER):
        frame = frame.f_back
    return frame


def function_of(frame: FrameType) -> str:
    """The function that a frame runs: `file.py function`. Nodes may have the file in different folders."""
    return f"{os.path.basename(frame.f_code.co_filename)} {frame.f_code.co_name}"


def site_of(frame: FrameType) -> str:
    """Where a frame stands: `file.py function:line`."""
    return f"{function_of(frame)}:{frame.f_lineno}"


def site_of_caller() -> str:
    """Where the user's code called into us."""
    frame = caller()
    return site_of(frame) if frame is not None else "?:0"


def site_of_function(function: Any) -> str:
    """The same for a function, which is decorated."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{getattr(function, '__qualname__', type(function).__qualname__)}:0"
    return f"{os.path.basename(code.co_filename)} {code.co_name}:{code.co_firstlineno}"


def base_of(me: Who, name: str) -> str:
    """The names of a job that torchrun has restarted are not those of its first attempt."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{me.size}/{name}"
