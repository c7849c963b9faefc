"""Which place of the program a call comes from, and how often it came: what equal calls of several ranks share."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import FrameType
from typing import Any

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


def site_of_caller() -> str:
    """Where the user's code called into us: `file.py function:line`. Nodes may have the file in different folders."""
    frame = caller()
    if frame is None:
        return "?:0"
    return f"{os.path.basename(frame.f_code.co_filename)} {frame.f_code.co_name}:{frame.f_lineno}"


def site_of_function(function: Any) -> str:
    """The same for a function, which is decorated."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{getattr(function, '__qualname__', type(function).__qualname__)}:0"
    return f"{os.path.basename(code.co_filename)} {code.co_name}:{code.co_firstlineno}"
