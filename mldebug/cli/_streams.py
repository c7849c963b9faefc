"""Where the output of a command and that of the program that runs underneath go."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from types import TracebackType
from typing import TextIO

from mldebug.core.report import Report, cannot_write, emit


def emit_beside(
    report: Report, args: argparse.Namespace, streams: StdoutToStderr | None, output: str | None = None
) -> None:
    """The report of a command that runs a program: on the real stdout under --json, else on stderr."""
    stream = None if streams is None else streams.stdout
    emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color, stream=stream, beside=True)


class StdoutToStderr:
    """While entered, what the process and its children write to stdout goes to stderr, at the level of the file
    descriptor too. `.stdout` is the real one.

    `for_good` leaves it so when the block ends well: a script's exit handlers must not print behind the document.
    A closed stdout or stderr is an MldebugError at once, not after the run.
    """

    def __init__(self, for_good: bool) -> None:
        self._for_good = for_good

    def __enter__(self) -> StdoutToStderr:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            if stream is None or stream.closed:
                raise cannot_write(f"{name} is closed")
        self._python_stdout = sys.stdout
        sys.stdout.flush()
        self._saved_fd = os.dup(1)
        os.dup2(2, 1)
        # Where Python's own stream is not on descriptor 1 (a notebook, a test), it is the real stdout by itself.
        self.stdout: TextIO = self._python_stdout
        if _is_on_fd(self._python_stdout, 1):
            self.stdout = open(os.dup(self._saved_fd), "w", encoding="utf-8")
        sys.stdout = sys.stderr
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.stdout is not self._python_stdout:
            with contextlib.suppress(OSError):  # what could not be written is the exception under way
                self.stdout.close()
        if exc is not None or not self._for_good:
            with contextlib.suppress(OSError):
                self._python_stdout.flush()
            os.dup2(self._saved_fd, 1)
            sys.stdout = self._python_stdout
        os.close(self._saved_fd)


def _is_on_fd(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (AttributeError, OSError, ValueError):
        return False
