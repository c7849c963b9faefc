"""Ctrl-C while our own commands load packages: torch, numpy and transformers take it for an error of the import, so
that it is lost, told as something else, or ends the process by SIGABRT."""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # type checkers take it for true: this is the first that a command loads, so it stays light
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_IMPORTING = "<frozen importlib._bootstrap>"


class Interrupts:
    """While entered, Ctrl-C in an import ends a command at once, and elsewhere is the KeyboardInterrupt that it is.

    Only in the main thread, and where nobody else handles SIGINT. What is to be removed at exit is removed.

        with Interrupts("mldebug"):
            import torch
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                self._before = signal.signal(signal.SIGINT, self._handle)
            except ValueError:  # not the main thread
                return self
        return self

    def __exit__(self, *_exc: Any) -> None:
        if self._before is not None and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != _IMPORTING:
            frame = frame.f_back
        if frame is None or _has_children():  # who has started children ends them on the way out
            raise KeyboardInterrupt
        import atexit

        try:
            os.write(2, f"{self._name}: interrupted\n".encode())
            atexit._run_exitfuncs()
        finally:
            os._exit(130)


class PythonsOwn:
    """While entered, Ctrl-C is what Python alone makes of it: for the program of somebody else.

    with PythonsOwn():
        exec(script)
    """

    def __enter__(self) -> None:
        self._ours: Any = None
        if is_ours(found := signal.getsignal(signal.SIGINT)):
            self._ours = found
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_exc: Any) -> None:
        if self._ours is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._ours)


def is_ours(handler: Any) -> bool:
    """Whether it is a handler of SIGINT that only raises, as Python's own does outside of imports."""
    return isinstance(getattr(handler, "__self__", None), Interrupts)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
