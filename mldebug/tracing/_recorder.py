"""What both engines share: which code is traced, what is written for it, and what happens when that fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Protocol

from mldebug.tracing._code import Lines
from mldebug.tracing._dynamo import hide_from_dynamo
from mldebug.tracing._files import warn
from mldebug.tracing._pen import LineCallback, Pen
from mldebug.tracing._safe_repr import arguments, safe_repr
from mldebug.tracing._select import Selection, is_ours

_OPTIMIZED = 1  # CO_OPTIMIZED: a function, whose locals are not a namespace
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class Options:
    """What is written besides lines. `depth` counts traced frames on the stack."""

    lines: bool = True
    returns: bool = False
    exceptions: bool = False
    args: bool = False
    depth: int | None = None
    count: bool = False


class Engine(Protocol):
    """`gate` is asked for each code object that begins to run until it says True: only then all is traced."""

    running: bool

    @property
    def waiting(self) -> bool: ...

    def start(self, gate: Callable[[CodeType, dict[str, Any]], bool] | None = None) -> None: ...
    def stop(self) -> None: ...
    def check(self) -> None: ...
    def after_fork(self) -> None: ...


class Recorder:
    """Called by an engine. Never keeps a frame or a value."""

    def __init__(self, selection: Selection, options: Options) -> None:
        self.options = options
        self.counts: dict[tuple[str, int], int] = {}  # of code that is gone
        self.codes: dict[int, Lines] = {}
        self.engine: Engine | None = None
        self.found = False  # some code that is traced
        self._selection = selection
        self._pen: Pen | None = None
        self._hidden = hide_from_dynamo()

    def write_with(self, pen: Pen | None) -> None:
        """Without a pen lines are counted only."""
        self._pen = pen
        if pen is not None:
            self.codes = pen.codes

    @property
    def line(self) -> LineCallback:
        """What an engine calls for each line: the pen's own function where nothing else is asked for."""
        write = self._pen.line if self._pen is not None else None
        if not self.options.count:
            return write or (lambda code, line: None)
        codes = self.codes

        def count(code: CodeType, line: int) -> None:
            hits = codes[id(code)].hits
            hits[line] = hits.get(line, 0) + 1
            if write is not None:
                write(code, line)

        return count

    def admit(self, frame: FrameType) -> Lines | None:
        """Decide whether the code of `frame` is traced, once. Code of no file belongs to who is the first to run it."""
        self._hidden = self._hidden or hide_from_dynamo()
        owner: FrameType | None = frame
        while owner is not None and owner.f_code.co_filename.startswith("<"):
            owner = owner.f_back if not frame.f_code.co_filename.startswith("<frozen") else None
        code, names = frame.f_code, frame.f_globals
        made_by = frame if owner is None else owner
        if is_ours(code, names) or not self._selection.wants(made_by.f_code, made_by.f_globals):
            return None
        self.found = True
        lines = self.codes[id(code)] = Lines(code, names, self._encode, self._gone)
        return lines

    def within(self, frame: FrameType | None) -> bool:
        """Whether `frame` is not deeper among the traced ones than asked for."""
        depth = self.options.depth
        if depth is None:
            return True
        while frame is not None:
            if id(frame.f_code) in self.codes:
                depth -= 1
                if depth < 0:
                    return False
            frame = frame.f_back
        return True

    @property
    def calls(self) -> bool:
        """Whether `call` must be called. Else `left` will do: a call is written with its first line, by one write."""
        return self.options.args or not self.options.lines

    def call(self, lines: Lines, frame: FrameType) -> None:
        """A frame was entered."""
        if self._pen is not None and self.within(frame):
            self._pen.call(lines, _arguments(lines, frame) if self.options.args else "")

    def leave(self, lines: Lines, frame: FrameType, value: Any, normally: bool = True) -> None:
        if self._pen is None:
            return
        if normally and self.options.returns and self.within(frame):
            self._pen.event(lines, frame.f_lineno or 0, f"{lines.function} <- {safe_repr(value)}")
        self._pen.left()

    @property
    def left(self) -> Callable[..., None]:
        """For each frame that is left or goes on."""
        return self._pen.left if self._pen is not None else _nothing

    def exception(self, lines: Lines, frame: FrameType, exc: BaseException) -> None:
        if self._pen is not None and self.within(frame):
            words = f"{lines.function} !! {type(exc).__name__}: {_message(exc)}"
            self._pen.event(lines, frame.f_lineno or 0, words)

    def failed(self, exc: Exception) -> None:
        """Ours: one warning, and the trace stops. What a signal handler of the program raised passes through."""
        if isinstance(exc, RecursionError):
            return  # at the limit of the program's own recursion: this line is missing
        traceback = exc.__traceback__
        while traceback is not None:
            if not traceback.tb_frame.f_code.co_filename.startswith((_OURS, _LIBRARY, "<frozen")):
                raise exc
            traceback = traceback.tb_next
        if self.engine is not None and self.engine.running:
            warn(f"the trace stops, the job goes on: {type(exc).__name__}: {exc}")
            self.engine.stop()

    def total(self) -> dict[tuple[str, int], int]:
        """How often each line ran, by file and number."""
        counts = dict(self.counts)
        for lines in list(self.codes.values()):
            _add(counts, lines)
        return counts

    def _encode(self, lines: Lines, line: int, text: bytes) -> Any:
        return self._pen.encode(lines, line, text) if self._pen is not None else text

    def _gone(self, key: int) -> None:
        lines = self.codes.pop(key, None)
        if lines is not None and self.options.count:
            _add(self.counts, lines)
        if self._pen is not None:
            self._pen.forget(key)


def _add(counts: dict[tuple[str, int], int], lines: Lines) -> None:
    for line, hits in lines.hits.items():
        counts[lines.path, line] = counts.get((lines.path, line), 0) + hits


def _arguments(lines: Lines, frame: FrameType) -> str:
    """The arguments of a call. Up to Python 3.12 looking makes a copy of the locals that would keep them alive."""
    if not frame.f_code.co_flags & _OPTIMIZED:
        return ""
    values = frame.f_locals
    text = arguments(lines.arguments, values)
    if sys.version_info < (3, 13) and sys.gettrace() is None:  # a trace function has its copy written back
        values.clear()
    return text


def _nothing(*_: object) -> None:
    """There is nothing to show."""


def _message(exc: BaseException) -> str:
    """The first argument if it is a plain string; `str` would run the program's code."""
    args = BaseException.__dict__["args"].__get__(exc)
    return args[0][:200] if args and type(args[0]) is str else ", ".join(map(safe_repr, args[:3]))
