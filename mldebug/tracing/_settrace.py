"""The engine for Python 3.10 and 3.11: sys.settrace, with one decision for each code object."""

from __future__ import annotations

import dis
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from mldebug.tracing._code import Lines
from mldebug.tracing._files import warn
from mldebug.tracing._recorder import Recorder

Gate = Callable[[CodeType, dict[str, Any]], bool]
_SUSPENDS = 0x20 | 0x80 | 0x200  # generators, coroutines, async generators
_LEAVES = {dis.opmap[name] for name in ("RETURN_VALUE", "YIELD_VALUE", "YIELD_FROM", "SEND") if name in dis.opmap}


class SettraceEngine:
    """Traces this thread and those that threading starts from now on. What had set a trace function gets it back."""

    def __init__(self, recorder: Recorder) -> None:
        self.running = False
        self._recorder = recorder
        self._found: tuple[Any, Any] = None, None
        self._gate: Gate | None = None
        self._local: Any = None
        self._decided: dict[int, Any] = {}  # id of code -> its Lines, or None where it is not traced
        self._alive: dict[int, weakref.ref[CodeType]] = {}

    def start(self, gate: Gate | None = None) -> None:
        if self.running:
            return
        self._gate, self.running = gate, True
        self._decided.clear()
        self._found = sys.gettrace(), threading.gettrace()
        self._make()
        if gate is None:
            self._seed(sys._getframe(1))
        threading.settrace(self._call)
        sys.settrace(self._call)

    def stop(self) -> None:
        if not self.running:
            return
        self.check()
        mine, threads = self._found
        if sys.gettrace() is self._call:
            sys.settrace(mine)
        self.running = False
        self._silence()
        self._decided.clear()  # so that each other thread comes to look, and goes untraced
        if threading.gettrace() is self._call:
            threading.settrace(threads)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace is self._local:
                frame.f_trace = None
                frame.f_trace_lines = True
            frame = frame.f_back

    @property
    def waiting(self) -> bool:
        return self.running and self._gate is not None

    def check(self) -> None:
        """Say so where the trace ended before its time."""
        if self.running and sys.gettrace() is None:
            by = "a debugger, sys.settrace or a RecursionError does that"
            warn(f"the trace ended early: its trace function was taken away ({by})")

    def after_fork(self) -> None:
        """The pen's functions are new; frames that are running have the old ones."""
        if self.running:
            self._make()
            self._seed(sys._getframe(1))
            threading.settrace(self._call)
            sys.settrace(self._call)

    def _seed(self, frame: FrameType | None) -> None:
        """Frames that are running: each may have a trace function of its own already."""
        while frame is not None:
            if self._decide(frame) is not None and (frame.f_trace is None or frame.f_trace in self._ours):
                frame.f_trace = self._local
                frame.f_trace_lines = self._recorder.options.lines
            frame = frame.f_back

    _ours: tuple[Any, ...] = ()

    def _decide(self, frame: FrameType) -> Lines | None:
        code = frame.f_code
        lines = self._recorder.codes.get(id(code))
        if lines is None:
            lines = self._recorder.admit(frame)
        key = id(code)
        self._alive[key] = weakref.ref(code, lambda _: self._gone(key))
        self._decided[key] = lines
        if lines is not None and code.co_flags & _SUSPENDS:
            lines.start = _first(code)
        return lines

    def _gone(self, key: int) -> None:
        self._decided.pop(key, None)
        self._alive.pop(key, None)

    def _make(self) -> None:
        recorder, decided, decide = self._recorder, self._decided, self._decide
        line, leave, left, failed = recorder.line, recorder.leave, recorder.left, recorder.failed
        limited, returns, exceptions = (
            recorder.options.depth is not None,
            recorder.options.returns,
            recorder.options.exceptions,
        )
        lines_too = recorder.options.lines
        codes, calls = recorder.codes, recorder.calls

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                if not limited or recorder.within(frame):
                    line(frame.f_code, frame.f_lineno)
                return local
            if event == "return" and not returns:
                left()
                return local
            if not self.running:
                frame.f_trace = None
                return None
            try:
                lines = codes.get(id(frame.f_code))
                if event == "return" and lines is not None:
                    leave(lines, frame, arg, arg is not None or _leaves(frame))
                elif event == "exception" and exceptions and lines is not None:
                    recorder.exception(lines, frame, arg[1] if isinstance(arg[1], BaseException) else arg[0]())
            except Exception as exc:
                failed(exc)
            return local

        def call(frame: FrameType, event: str, arg: Any) -> Any:
            code = frame.f_code
            new = False
            try:
                lines = decided[id(code)]
            except KeyError:  # left at once: a Ctrl-C in what follows would be shown as raised while this was handled
                lines, new = None, True
            if new:
                try:
                    if self._closed(code, frame):
                        return None
                    lines = decide(frame)
                except Exception as exc:
                    failed(exc)
            if lines is None:
                return None
            if not self.running:  # in a thread of which nobody could take it back
                sys.settrace(None)
                return None
            try:
                if lines.start is None or lines.start == frame.f_lasti:
                    if calls:
                        recorder.call(lines, frame)
                    else:
                        left()
                if not lines_too:
                    frame.f_trace_lines = False
            except Exception as exc:
                failed(exc)
            return local

        def silence() -> None:
            """Frames of other threads keep `local` until they end."""
            nonlocal line, left
            line = left = _nothing

        self._silence = silence
        self._ours = (*self._ours, local)[-4:]
        self._local, self._call = local, call

    _call: Any
    _silence: Callable[[], None]

    def _closed(self, code: CodeType, frame: FrameType) -> bool:
        if not self.running:
            sys.settrace(None)
            return True
        if self._gate is None:
            return False
        if not self._gate(code, frame.f_globals):
            return True
        self._gate = None
        self._seed(frame.f_back)
        return False


def _first(code: CodeType) -> int:
    """f_lasti of a generator that begins: at RESUME 0, which Python 3.10 does not have."""
    if sys.version_info < (3, 11):
        return -1
    return next((at.offset for at in dis.get_instructions(code) if at.opname == "RESUME" and at.arg == 0), 0)


def _nothing(*_: object) -> None:
    """The trace is over."""


def _leaves(frame: FrameType) -> bool:
    """A None that is returned, not an exception that passes through."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] in _LEAVES
