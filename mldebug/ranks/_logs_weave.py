"""Tracebacks of processes that write to one stream without a prefix: their lines come interleaved."""

from __future__ import annotations

import re

from mldebug.ranks._logs_traceback import HEADER, Gathering

_MOST = 64
_FRAME = re.compile(rb' *File "')
_CARETS = re.compile(rb" *[~^ ]+$")
# What may follow what within a traceback: `h`eader, `f`rame, `c`ode, carets `^`, the `e`xception.
_AFTER = {"h": "f", "f": "fce", "c": "f^e", "^": "fe"}


class Weave:
    """The tracebacks under way in such a stream. Best effort: a line goes where it can follow."""

    def __init__(self) -> None:
        self.open: list[Gathering] = []
        self.interleaved = 0  # tracebacks that began within another

    def begin(self, one: Gathering) -> Gathering | None:
        """Start one; the oldest of too many is given back, to be closed as it is."""
        busy = [other for other in self.open if other.state == "stack"]
        self.interleaved += bool(busy)
        self.open.append(one)
        return self.open.pop(0) if len(self.open) > _MOST else None

    def take(self, text: bytes) -> tuple[bool, list[Gathering]]:
        """Whether the line belongs to one of them, and those that are over."""
        over: list[Gathering] = []
        busy = [one for one in self.open if one.state == "stack" and not (one.grouped or one.rich)]
        ended = next((one for one in self.open if one.state == "after" and one.wants(text)), None)
        if ended is not None:  # more of its message, and no exception of another
            ended.take(text, False)
            return True, over
        if busy and len(self.open) > 1 and (one := self._whose(text, busy)) is not None:
            one.take(text, False)
            return True, over
        for one in reversed(list(self.open)):  # the one that got the last line comes first
            verdict = one.take(text, False)
            if verdict is None:
                self.open.remove(one)
                over.append(one)
            elif verdict:
                self.open.remove(one)
                self.open.append(one)
                return True, over
        return False, over

    def _whose(self, text: bytes, busy: list[Gathering]) -> Gathering | None:
        kind = _kind(text)
        fits = [one for one in busy if kind in _AFTER.get(_kind(one.lines[-1]), "")]
        for one in fits:  # another has had the same lines before: this is how it went on there
            length = len(one.lines)
            for other in self.open:
                if (
                    other is not one
                    and len(other.lines) > length
                    and other.lines[length] == text
                    and other.lines[:length] == one.lines
                ):
                    return one
        return fits[-1] if fits else None


def _kind(text: bytes) -> str:
    if text.startswith(HEADER):
        return "h"
    if _FRAME.match(text):
        return "f"
    if text[:1] in (b" ", b"\t"):
        return "^" if _CARETS.match(text) else "c"
    return "e" if text.strip() else "?"
