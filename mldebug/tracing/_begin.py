"""When tracing begins and pauses: at a function, after a time, at a signal."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.tracing._files import warn
from mldebug.tracing._select import Selection

Gate = Callable[[CodeType, dict[str, Any]], bool]


def at_function(pattern: str) -> Gate:
    """A gate that opens when this function is called. `pattern` is `module:function`; without one, UsageError."""
    if not pattern.partition(":")[2]:
        raise UsageError(f"start_at is {pattern!r}, which names no function", "write module:function, as train:main")
    return Selection([pattern]).wants


class Timer:
    """Calls a function after some seconds, in a thread that the program's list of threads does not show."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self._cancelled = _thread.allocate_lock()
        self._cancelled.acquire()
        self._seconds, self._function = seconds, function
        _thread.start_new_thread(self._wait, ())

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._cancelled.release()

    def _wait(self) -> None:
        if self._cancelled.acquire(timeout=min(self._seconds, threading.TIMEOUT_MAX)):
            return
        try:
            self._function()
        except Exception as exc:
            warn(f"the trace does not start: {exc}")


class Toggle:
    """Calls a function at each signal of this number, unless the program, or somebody before it, uses the signal."""

    def __init__(self, number: int, function: Callable[[], None]) -> None:
        self._number = number
        self._before: Any = None
        if threading.current_thread() is not threading.main_thread():
            warn(f"{name_of(number)} does not toggle the trace: Python takes signals in its main thread only")
        elif signal.getsignal(number) != signal.SIG_DFL or _is_caught(number):
            warn(f"{name_of(number)} does not toggle the trace: it has a handler already; choose another by --signal")
        else:

            def handler(_number: int, _frame: FrameType | None) -> None:
                function()

            self._handler = handler
            self._before = signal.signal(number, handler)
            signal.siginterrupt(number, False)  # calls of the system go on

    def close(self) -> None:
        if self._before is not None and signal.getsignal(self._number) is self._handler:
            with contextlib.suppress(ValueError):  # in another thread
                signal.signal(self._number, self._before)


def signal_number(name: str | int) -> int:
    """The number of a signal given as `SIGUSR2`, `USR2`, `SIGRTMIN+7` or a number."""
    text = str(name).upper()
    text = text if text.isdecimal() or text.startswith("SIG") else f"SIG{text}"
    base, _, more = text.partition("+")
    number = int(text) if text.isdecimal() else int(getattr(signal, base, 0)) + int(more if more.isdecimal() else 0)
    if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(f"signal is {name!r}, which is none that a program can take", "SIGRTMIN+7, USR2, or none")
    return number


def name_of(number: int) -> str:
    """How people write it: real-time signals count from SIGRTMIN."""
    lowest = getattr(signal, "SIGRTMIN", number + 1)
    return signal.Signals(number).name if number <= lowest else f"SIGRTMIN+{number - lowest}"


def _is_caught(number: int) -> bool:
    """Whether the process has a handler that Python does not know of: a library's, in C."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False
