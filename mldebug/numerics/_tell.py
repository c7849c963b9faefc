"""Print and warn, from inside somebody's training run."""

from __future__ import annotations

import contextlib
import sys
import warnings

from mldebug.core.errors import MldebugError
from mldebug.core.report import tell, write
from mldebug.numerics._report import NumericsWarning


def say(text: str) -> None:
    """Print for people. A closed or full stdout is no reason to lose an event."""
    with contextlib.suppress(MldebugError, OSError, ValueError):
        write(text + "\n", sys.stdout)


def warn(text: str) -> None:
    """Warn, at the user's own line. Where warnings are errors it goes to stderr instead: the recorder must not break
    off in the middle."""
    try:
        warnings.warn(text, NumericsWarning, stacklevel=_users_frame())
    except Warning:
        tell(text + "\n")


def _users_frame() -> int:
    """The stacklevel, for warn(), of the first caller outside mldebug and torch."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


_NOT_THE_USERS = ("mldebug", "torch", "contextlib", "functools")
