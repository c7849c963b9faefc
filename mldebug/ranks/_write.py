"""Writes text to a stream as a whole: nothing of other processes or threads comes in between."""

from __future__ import annotations

import contextlib
import fcntl
import io
import operator
import os
import select
import stat
import sys
import time
from typing import Any

from mldebug.ranks._lock import BOUND, LOCK, NOTHING, SLOTS


def write_whole(stream: Any, text: str, bound: float = BOUND) -> None:
    """Write `text` to `stream` under the lock of its output, and flush it before the lock goes.

    A plain text file over a descriptor gets its bytes by os.write, after what it still had in its buffer; any other
    object through its own `write`. Errors are those of `print(text, end="", file=stream, flush=True)`.
    """
    fd = _plain_descriptor(stream)
    if fd < 0:
        _write_through(stream, text, bound)
        return
    data = text.encode(stream.encoding, stream.errors)
    output = _outputs.get(fd)
    if output is None or time.monotonic() > output.until:
        output = _outputs[fd] = _Output(fd, os.fstat(fd), output)
    slot = output.slot
    had = LOCK.take(slot, fd, bound)
    try:
        try:
            stream.flush()  # what it has in its buffer comes first
        except (RuntimeError, BlockingIOError):
            _flush(stream)
        _send(output, data, alone=had != NOTHING)
    finally:
        LOCK.free(slot, had)


def is_plain(stream: Any) -> bool:
    """Whether `stream` is a text file of Python's own over a descriptor."""
    return _plain_descriptor(stream) >= 0


class _Output:
    """What is known of a descriptor. Looked at anew now and then, as a program may put another file there (dup2)."""

    def __init__(self, fd: int, state: os.stat_result, before: _Output | None) -> None:
        self.fd = fd
        self.until = time.monotonic() + 0.02
        self.file = (state.st_dev, state.st_ino)
        self.slot = _slot(state)
        # The position counts only where there is one, and where each write does not go to the end by itself.
        self.seeks = stat.S_ISREG(state.st_mode) and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        self.end: int = before.end if before is not None and before.file == self.file else 0  # of our last line

    def to_end(self) -> None:
        """Where several processes have opened one file themselves, without O_APPEND, each would write over the lines
        of the others. A position that the program has set itself is left alone."""
        if os.lseek(self.fd, 0, os.SEEK_CUR) == self.end:
            os.lseek(self.fd, 0, os.SEEK_END)


class _Line:
    """Bytes on their way. How many are gone is kept in a list that C code appends to: a signal handler sees what has
    been written, and what has not."""

    __slots__ = ("data", "fd", "sent")

    def __init__(self, fd: int, data: bytes) -> None:
        self.fd = fd
        self.data = data
        self.sent: list[int] = []


_current: _Line | None = None  # of the thread that holds the lock
_outputs: dict[int, _Output] = {}  # by descriptor
# Encodings whose bytes do not depend on what came before (utf-16 begins with a mark, once).
_STATELESS = {"utf-8", "ascii", "us-ascii", "latin-1", "iso-8859-1", "iso8859-1", "iso8859-15", "cp1252", "646"}
_PIECE = select.PIPE_BUF  # what a pipe that is ready takes without waiting


def _plain_descriptor(stream: Any) -> int:
    if type(stream) is not io.TextIOWrapper or stream.closed or "write" in vars(stream):  # wandb puts its own there
        return -1
    buffer = stream.buffer
    raw = buffer.raw if type(buffer) is io.BufferedWriter else buffer  # the latter under python -u
    if type(raw) is not io.FileIO or stream.encoding.lower().replace("_", "-") not in _STATELESS:
        return -1
    return raw.fileno()


def _slot(state: os.stat_result) -> int:
    return (state.st_ino * 31 + state.st_dev) % SLOTS


def _write_through(stream: Any, text: str, bound: float) -> None:
    """An object of somebody else's, as in notebooks and tests, or a wrapper. It most likely ends where stdout does."""
    fd = 2 if stream is sys.stderr else 1
    with contextlib.suppress(Exception):
        fd = int(stream.fileno())
    try:
        slot = _slot(os.fstat(fd))
    except (OSError, OverflowError):
        fd, slot = -1, 0
    had = LOCK.take(slot, fd, bound)
    try:
        stream.write(text)
        flush = getattr(stream, "flush", None)
        if flush is not None:
            flush()
    finally:
        LOCK.free(slot, had)


def _flush(stream: Any) -> None:
    """Flush a stream that could not just now."""
    while True:
        try:
            stream.flush()
            return
        except RuntimeError:  # a signal handler that interrupted a flush of the same stream
            return
        except BlockingIOError:
            _wait(stream.fileno())


def _send(output: _Output, data: bytes, alone: bool) -> None:
    global _current
    outer = _current if alone else None
    if outer is not None and outer.sent:  # we are in a signal handler, perhaps in the middle of a line
        _drain(outer)
    line = _Line(output.fd, data)
    if alone:
        _current = line
    try:
        if output.seeks:
            output.to_end()
        try:
            # One call of C, from the write to the note of what it wrote: no handler runs in between.
            line.sent.extend(map(os.write, (line.fd,), (data,)))
        except BlockingIOError:
            _drain(line)
        else:
            if line.sent[0] < len(data):
                _drain(line)
    except OSError:
        raise
    except BaseException:  # Ctrl-C: not in the middle of a line, unless nobody reads on
        if line.sent:
            with contextlib.suppress(OSError):
                _drain(line, patience=1.0)
        raise
    finally:
        if alone:
            _current = outer
        if output.seeks:
            output.end = os.lseek(output.fd, 0, os.SEEK_CUR)


def _drain(line: _Line, patience: float | None = None) -> None:
    """Write the rest, only as much at a time as fits, so that a signal handler never finds a write that waits with a
    part of the line gone: the kernel would begin that write anew afterwards."""
    sent = line.sent
    view: Any = memoryview(line.data)
    write: Any = os.write
    while sum(sent) < len(view):
        if not _wait(line.fd, patience):
            return
        # What the rest is, is found in the same call of C: a handler just before may have written some of it.
        pieces = map(slice, map(sum, (sent,)), map(sum, (sent,), (_PIECE,)))
        with contextlib.suppress(BlockingIOError):
            sent.extend(map(write, (line.fd,), map(operator.getitem, (view,), pieces)))


def _wait(fd: int, seconds: float | None = None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _forget() -> None:
    """In a forked child: the line is the parent's to finish."""
    global _current
    if _current is not None:
        _current.sent.append(len(_current.data) - sum(_current.sent))
        _current = None


os.register_at_fork(after_in_child=_forget)
