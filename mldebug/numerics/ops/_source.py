"""Which line of whose code is running: the user's or the model's, and not torch's."""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

_USER, _LIBRARY, _OURS = range(3)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_ROOM = os.path.dirname(os.path.dirname(__file__))
_HERE = _ROOM + os.sep
_PASSED_BY = (
    "_hub.py",
    "_ops.py",
    "_loss_backward.py",
    "_collectives.py",
)  # they stand between a module and its caller
_WRAPPERS = tuple(  # of transformers, around calls of torch; and of the libraries that call a step
    os.path.join(os.sep, *path)
    for path in (
        ("transformers", "integrations"), ("transformers", "utils"), ("transformers", "loss"),
        ("transformers", "pytorch_utils.py"), ("transformers", "modeling_utils.py"),
        ("transformers", "modeling_layers.py"), ("transformers", "activations.py"),
        ("transformers", "masking_utils.py"), ("accelerate", "utils"), ("accelerate", "hooks.py"), ("einops", ""),
        ("torchmetrics", "utilities"),
    )
)  # fmt: skip


class Line(NamedTuple):
    """A line of source: file, number (from 1), and the function it stands in."""

    file: str
    number: int
    function: str

    @property
    def code(self) -> str:
        """Its text; "" where the file cannot be read."""
        return linecache.getline(self.file, self.number).strip()


def users_line() -> Line | None:
    """The innermost line of user or model code; None where there is none, as in the threads of backward."""
    found = _innermost(sys._getframe(1))
    return None if found is None else _line(found)


def line_of_variable(holds: Callable[[Any], bool]) -> Line | None:
    """The line of a caller's that gave a variable the value for which `holds` is true, the last before the line that
    the caller is in now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _owner(frame.f_code.co_filename) == _USER:
            for name in [name for name, value in list(frame.f_locals.items()) if holds(value)]:
                lines = list(_assignments(frame.f_code, name))
                number = max((line for line in lines if line <= frame.f_lineno), default=max(lines, default=0))
                if number:
                    return _line(frame)._replace(number=number)
        frame = frame.f_back
    return None


def _assignments(code: CodeType, name: str) -> Iterator[int]:
    """The lines of a function that give a variable of its own a value."""
    lines = [(start, end, line) for start, end, line in code.co_lines() if line is not None]
    for step in dis.get_instructions(code):
        # From Python 3.13 on one instruction may store two variables, or store one and load another.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        stored = names[:1] if "LOAD" in step.opname else names
        if step.opname.startswith("STORE_") and name in stored:
            yield from (line for start, end, line in lines if start <= step.offset < end)


def line_in_backward() -> Line | None:
    """Inside backward: the innermost line of user code that it has called, a hook or a formula of the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward" and not _calls_forward(frame):
        if _owner(frame.f_code.co_filename) == _USER:
            return _line(frame)
        frame = frame.f_back
    return None


def ours_is_running() -> bool:
    """Whether the operation under way is one of our own: a measurement, a replay."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner != _LIBRARY:
            return owner == _OURS
        name = frame.f_code.co_name
        if name == "_engine_run_backward" or _calls_forward(frame):
            return False  # of a replay: a model made of torch's own modules has no line of the user's
        frame = frame.f_back
    return False


def recomputed() -> bool:
    """Inside backward: whether a forward runs again (activation checkpointing), and not a gradient formula."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            return False
        if code.co_name in ("_call_impl", "inner") and code.co_filename == _MODULE:
            return True
        if code.co_filename == _CHECKPOINT and code.co_name != "backward":
            return True
        frame = frame.f_back
    return False


def _calls_forward(frame: FrameType) -> bool:
    """Whether a frame is the one that calls a module's forward, or the formula of a gradient again."""
    code = frame.f_code
    if code.co_filename == _MODULE:
        return code.co_name in ("_call_impl", "inner")
    return (code.co_name, code.co_filename) in (("_call", _HUB), ("_again", _NODES))


def callers(*names: str) -> bool:
    """Whether one of these files of torch (`optim/`, `amp/grad_scaler.py`) is in the stack, above any forward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _MODULE:
            return False
        if file.startswith(_TORCH) and file[len(_TORCH) :].replace(os.sep, "/").startswith(names):
            return True
        frame = frame.f_back
    return False


_MODULE = os.path.join(_TORCH, "nn", "modules", "module.py")
_HUB = os.path.join(_ROOM, "_hub.py")
_NODES = os.path.join(_ROOM, "ops", "_loss_backward.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")


def _line(frame: FrameType) -> Line:
    code = frame.f_code
    return Line(code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name))  # qualname: Python 3.11


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if _owner(frame.f_code.co_filename) == _USER:
            return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def _owner(file: str) -> int:
    if file.startswith(_HERE):
        return _LIBRARY if os.path.basename(file) in _PASSED_BY else _OURS
    if file.startswith((_TORCH, "<")) or any(part in file for part in _WRAPPERS):
        return _USER if file.startswith(("<stdin", "<string", "<ipython")) else _LIBRARY
    return _LIBRARY if os.path.basename(file) in ("contextlib.py", "functools.py") else _USER
