"""A stream that passes on whole lines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

_MOST = 1 << 20  # characters without a newline that are kept
# Attributes of ours; others are set on the stream beneath. wandb replaces `write` of sys.stdout by a function that
# calls the one of before: it stands before ours.
_OURS = ("_mldebug_stream", "_show", "_parts", "ended", "write", "writelines", "flush", "close")


def plain_stream(stream: Any) -> Any:
    """The stream beneath ours."""
    while isinstance(stream, LineStream):
        stream = stream._mldebug_stream
    return stream


class LineStream:
    """Stands for a text stream. What is written is passed to `show(text, stream)` in whole lines; what has no newline
    yet is kept, apart for each thread, until the newline or a flush. Everything else is the stream's own."""

    def __init__(self, stream: Any, show: Callable[[str, Any], None]) -> None:
        self._mldebug_stream = stream
        self._show = show
        self._parts: dict[int, str] = {}
        self.ended = False

    def write(self, text: str) -> int:
        if self.ended or not isinstance(text, str) or getattr(self._mldebug_stream, "closed", False):
            written: int = self._mldebug_stream.write(text)  # and raises what it raises
            return written
        me = threading.get_ident()
        whole = self._parts.pop(me, "") + text
        cut = len(whole) if len(whole) > _MOST else whole.rfind("\n") + 1
        if cut < len(whole):
            self._parts[me] = self._parts.pop(me, "") + whole[cut:]  # a signal handler may have written meanwhile
        if cut:
            self._show(whole[:cut], self._mldebug_stream)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        part = self._parts.pop(threading.get_ident(), "")
        if part:
            self._show(part, self._mldebug_stream)
        self._mldebug_stream.flush()

    def end(self) -> None:
        """Pass on what is kept, of all threads, and from now on everything as it comes."""
        self.ended = True
        while self._parts:
            _thread, part = self._parts.popitem()
            with contextlib.suppress(OSError, ValueError):
                self._show(part, self._mldebug_stream)

    def close(self) -> None:
        self.end()
        self._mldebug_stream.close()

    @property
    def buffer(self) -> Any:
        """Bytes that are written there come after what was written here."""
        if self._parts.get(threading.get_ident()):
            self.flush()
        return self._mldebug_stream.buffer

    def __getattr__(self, name: str) -> Any:
        if name == "_mldebug_stream":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._mldebug_stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OURS:
            super().__setattr__(name, value)
        else:
            setattr(self._mldebug_stream, name, value)

    def __iter__(self) -> Any:
        return iter(self._mldebug_stream)

    def __enter__(self) -> LineStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
