"""The errors that mldebug raises on purpose: each says what is wrong and what to do next."""

from __future__ import annotations


class MldebugError(Exception):
    """An error with a hint. The command line prints its two lines and no traceback.

    `message` says what is wrong, with the value at fault; `hint` says what to do about it and may be empty.

        raise MldebugError(f"cannot read {path}: no such file", "give the path that --output was given")
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both are kept in args, so that the error survives pickling
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(MldebugError):
    """A command or function was called in a way that cannot work. The command line leaves with status 2.

    raise UsageError("--max-frames is 0", "keep at least one frame")
    """
