"""Writes the lines of a trace as text, each by one write before the next line of the program runs."""

from __future__ import annotations

import os
import threading
from _thread import get_ident
from collections.abc import Callable
from time import monotonic
from types import CodeType
from typing import Any, Protocol

from mldebug.tracing._code import Lines
from mldebug.tracing._files import END, TraceFile, now
from mldebug.tracing._lines import prefix, shorten

LineCallback = Callable[[CodeType, int], Any]


class Sink(Protocol):
    """Where text goes: a TraceFile, or a Stream."""

    piece: int
    path: str

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def after_fork(self) -> None: ...


class Stream:
    """A stream of the program, looked up each time: `sys.stdout` may be replaced while it runs."""

    piece, path = 1, ""

    def __init__(self, stream: Callable[[], Any]) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream().write(data.decode("utf-8", "replace"))

    def close(self) -> None:
        flush = getattr(self._stream(), "flush", None)
        if flush is not None:
            flush()

    def after_fork(self) -> None:
        """The stream is the child's as well."""


class Pen(Protocol):
    """What an engine calls. `codes` is from the id of a code object to its Lines: `line` looks there."""

    codes: dict[int, Lines]
    line: LineCallback

    @property
    def path(self) -> str: ...

    def encode(self, lines: Lines, line: int, text: bytes) -> Any:
        """What `line` needs to write this text: kept in `lines`."""

    def forget(self, key: int) -> None:
        """The code object with this id is no more."""

    def call(self, lines: Lines, words: str) -> None:
        """A frame was entered; `words` are its arguments, or empty."""

    def event(self, lines: Lines, line: int, words: str) -> None:
        """Something else at a line: a value that is returned, an exception."""

    # The next line is in another frame, maybe of the same code: show its call again. Takes what a callback is given.
    left: Callable[..., None]

    def after_fork(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...


class TextPen:
    """Text lines to a sink. The line of the call is shown again where another frame or thread goes on."""

    line: LineCallback
    call: Callable[[Lines, str], None]
    event: Callable[[Lines, int, str], None]
    left: Callable[..., None]

    def __init__(
        self, sink: Sink, failed: Callable[[Exception], None], *, timing: bool, log_pids: bool, threads: bool
    ) -> None:
        self.codes: dict[int, Lines] = {}
        self._sink, self._failed = sink, failed
        self._options = timing, log_pids, threads
        self._main = threading.main_thread().ident
        self._begin()

    @property
    def path(self) -> str:
        return self._sink.path

    def encode(self, lines: Lines, line: int, text: bytes) -> bytes:
        lines[line] = data = text + b"\n"
        return data

    def forget(self, key: int) -> None:
        """The texts go with the Lines."""

    def after_fork(self) -> None:
        self._sink.after_fork()
        self._main = threading.main_thread().ident
        self._begin()

    def end(self) -> None:
        if isinstance(self._sink, TraceFile):
            self._sink.write(END + f" {now()}\n".encode())

    def close(self) -> None:
        self._sink.close()

    def _begin(self) -> None:
        """Make the functions anew, with the clock at 0: all that a line needs is in variables of one closure."""
        timing, log_pids, names = self._options
        pid = os.getpid() if log_pids else None
        sink, codes, main = self._sink, self.codes, self._main
        write, failed = sink.write, self._failed
        # A signal handler may come in while it is held, and wait there for a thread that wants it: then go without.
        lock, patience = threading.Lock(), _PATIENCE
        acquire, release = lock.acquire, lock.release
        started = monotonic()
        tick = 0.0 if timing else float("inf")  # when the text of the time changes
        thread, piece = 0, sink.piece
        ahead = call_ahead = b""
        context: Lines | None = None

        def turn(ident: int) -> None:
            """Another second, another thread, or another file."""
            nonlocal tick, thread, ahead, call_ahead, context, piece
            seconds = None
            if timing:
                seconds = int(monotonic() - started)
                tick = started + seconds + 1
            if ident != thread or piece != sink.piece:
                thread, piece, context = ident, sink.piece, None
            name = _thread_name(ident) if names or ident != main else None
            ahead = prefix(seconds, pid=pid, thread=name)
            call_ahead = prefix(pid=pid, thread=name)

        def aside(lines: Lines, text: bytes, is_call: bool) -> None:
            """Without the lock: nothing that another thread is about to write with is touched."""
            ident = get_ident()
            name = _thread_name(ident) if names or ident != main else None
            call = prefix(pid=pid, thread=name)
            full = prefix(int(monotonic() - started) if timing else None, pid=pid, thread=name)
            write(call + text if is_call else call + lines.call + b"\n" + full + text)

        def line(code: CodeType, number: int) -> None:
            nonlocal context, patience
            try:
                lines = codes[id(code)]
                text = lines[number]
                if not acquire(True, patience):  # the text, its call and its prefix belong together
                    patience = 0
                    aside(lines, text, False)
                    return
                try:
                    if get_ident() != thread or monotonic() >= tick or piece != sink.piece:
                        turn(get_ident())
                    if lines is context:
                        write(ahead + text)
                    else:
                        context = lines
                        write(call_ahead + lines.call + b"\n" + ahead + text)
                finally:
                    release()
            except Exception as exc:
                failed(exc)

        def call(lines: Lines, words: str) -> None:
            put(lines, shorten(lines.call + words.encode("utf-8", "backslashreplace"), 4000), True)

        def event(lines: Lines, number: int, words: str) -> None:
            put(lines, shorten(lines.at(number, words), 4000), False)

        def put(lines: Lines, text: bytes, is_call: bool) -> None:
            nonlocal context, patience
            if not acquire(True, patience):
                patience = 0
                aside(lines, text + b"\n", is_call)
                return
            try:
                turn(get_ident())
                known, context = is_call or lines is context, lines
                before = b"" if known else call_ahead + lines.call + b"\n"
                write(before + (call_ahead if is_call else ahead) + text + b"\n")
            finally:
                release()

        def left(_code: object = None, _offset: object = 0, _value: object = None) -> None:
            nonlocal context
            context = None

        self.line, self.call, self.event, self.left = line, call, event, left


_PATIENCE = 1.0  # seconds that a thread waits for another to write its line


def _thread_name(ident: int) -> str:
    """Without threading.current_thread(), which would make an entry for a thread that it does not know."""
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return f"thread-{ident}" if thread is None else str(thread._name)
