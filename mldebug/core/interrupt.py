"""Ctrl-C while packages are imported, which torch, numpy and transformers take for an error of the import: the
interrupt is lost, told as something else, or ends the process by SIGABRT."""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False  # type checkers take it for true: this is the first that a command loads, so it stays light
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_TICK = 0.02
_STUCK = 1.0  # seconds in the same import, after which it is no loading: a script may train in a module it imports
_IMPORTING = "<frozen importlib._bootstrap>"


class Interrupts:
    """While entered, Ctrl-C in an import ends a command at once, and elsewhere is the KeyboardInterrupt that it is.

    Once there is more to end than the process itself, a script (see `Kept`) or children, it is raised when the import
    is over, or at the second Ctrl-C. Only in the main thread, and where nobody else handles SIGINT.

        with Interrupts("mldebug"):
            import torch
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: object | None = None
        self._before: Any = None
        self._handler = self._handle  # one object, as it is compared by `is`

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._handler)
            except ValueError:  # not the main thread
                return self
            # Who asks whether Ctrl-C is still Python's own (asyncio.run does, and cancels its task then) is told yes.
            self._before = signal.default_int_handler
            signal.default_int_handler = self._handler  # type: ignore[assignment]
        return self

    def __exit__(self, *_exc: Any) -> None:
        self._waiting = None
        if self._before is None:
            return
        if signal.getsignal(signal.SIGINT) is self._handler:
            signal.signal(signal.SIGINT, self._before)
        signal.default_int_handler = self._before

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        if self._waiting is None and _innermost_import(frame) is not None:
            if not Kept.now and not _has_children():
                self._end()
            import _thread

            self._waiting = token = object()
            _thread.start_new_thread(self._raise_later, (token, _thread.get_ident()))
            return
        self._waiting = None
        raise KeyboardInterrupt

    def _end(self) -> None:
        """The end of Python without the way out through the import: what is to be removed at exit is removed."""
        import atexit

        try:
            os.write(2, f"{self._name}: interrupted\n".encode())
            atexit._run_exitfuncs()
        finally:
            os._exit(130)

    def _raise_later(self, token: object, main: int) -> None:
        """In a thread: send the signal again when the main thread imports nothing more."""
        seen: FrameType | None = None
        since = time.monotonic()
        while self._waiting is token:
            time.sleep(_TICK)
            found = _innermost_import(sys._current_frames().get(main))
            if found is None:
                self._waiting = None  # so that the next import, which begins just now, is waited for too
                signal.pthread_kill(main, signal.SIGINT)
            elif found is not seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() - since > _STUCK:
                signal.pthread_kill(main, signal.SIGINT)  # as a second Ctrl-C
                return


class Kept:
    """While entered, Ctrl-C in an import does not end the process at once: a script has its own way out.

    with Kept():
        run_the_script()
    """

    now = 0

    def __enter__(self) -> None:
        Kept.now += 1

    def __exit__(self, *_exc: Any) -> None:
        Kept.now -= 1


def _innermost_import(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
