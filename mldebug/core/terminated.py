"""What is said before SIGTERM ends the process: it ends as it would have, and nothing of the script runs more."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_PATIENCE = 5.0  # seconds that the main thread has: it may be in a call that never comes back


class LastWord:
    """While entered, SIGTERM has `say` called, and then ends the process by SIGTERM as it would have.

    Only where nobody else handles it, and in the main thread; a script may set a handler of its own, which is then
    the only one. Where the main thread is stuck outside of Python, as in a collective, the process ends without the
    word after some seconds. Processes that are forked have none of it.
    """

    def __init__(self, say: Callable[[], object]) -> None:
        self._say = say
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> LastWord:
        if threading.current_thread() is not threading.main_thread():
            return self
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return self
        # Python runs handlers in the main thread alone; the byte in the pipe is written at once.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        _entered.append(self)
        threading.Thread(target=_watch, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, *_exc: Any) -> None:
        if self._pipe is None:
            return
        self._undo()
        os.close(self._pipe[1])  # the thread reads the end, and closes the other one
        self._pipe = None

    def _undo(self) -> None:
        assert self._pipe is not None
        if self in _entered:
            _entered.remove(self)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        now = signal.set_wakeup_fd(self._wakeup_before)
        if now != self._pipe[1]:  # of the script's event loop
            signal.set_wakeup_fd(now)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        try:
            self._say()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def finished_first() -> Iterator[None]:
    """While entered, SIGTERM waits: the process ends by it afterwards. For writing a report of a few seconds."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    come: list[int] = []
    if mine:
        signal.signal(signal.SIGTERM, lambda number, _frame: come.append(number))
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if come:
            os.kill(os.getpid(), signal.SIGTERM)


_entered: list[LastWord] = []
_mask = threading.local()


# A child that is ended at once must not take the signal by our handler, which would be lost, and told in our pipe.
def _before_fork() -> None:
    if _entered:
        _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    before = _mask.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_child() -> None:
    for one in list(_entered):
        one._undo()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _watch(reader: int) -> None:
    while True:
        seen = os.read(reader, 64)
        if not seen:
            os.close(reader)
            return
        if signal.SIGTERM in seen:
            threading.Event().wait(_PATIENCE)
            if not _entered:
                continue  # it was over by itself, or the script's own handler took it
            if signal.getsignal(signal.SIGTERM) == _entered[-1]._handle:
                libc = ctypes.CDLL(None)  # Python lets only its main thread set this
                libc.signal(int(signal.SIGTERM), ctypes.c_void_p(0))
                os.kill(os.getpid(), signal.SIGTERM)
