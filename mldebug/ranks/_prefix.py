"""Prefixes of lines: which rank, of which host, said it."""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.world import World, world

DEFAULT = "[{host}:{rank}] "
_known: tuple[tuple[str | None, ...], World] | None = None


def whoami() -> dict[str, Any]:
    """host, rank, local_rank and world_size. A process group says it best: its ranks may come from no launcher."""
    global _known
    key = (socket.gethostname(), *map(os.environ.get, ("RANK", "LOCAL_RANK", "WORLD_SIZE")))  # programs set these
    if _known is None or _known[0] != key:  # reading all that launchers leave takes longer than a print
        _known = (key, world())
    me = _known[1]
    values = {"host": me.host, "rank": me.rank, "local_rank": me.local_rank, "world_size": me.world_size}
    dist = process_group()
    if dist is not None:
        values.update(rank=dist.get_rank(), world_size=dist.get_world_size())
    return values


def process_group() -> Any:
    """torch.distributed, if the program has loaded it and initialised a process group; else None."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


class Prefix:
    """A format to put before every line of a text.

    Prefix.of("[{rank}]").before_lines("a\\nb\\n", sys.stdout)  # "[0] a\\n[0] b\\n"
    """

    def __init__(self, form: str) -> None:
        self._form = form if form[-1:].isspace() else form + " "
        try:
            self._form.format(**_EXAMPLE)
        except (LookupError, ValueError, AttributeError) as exc:
            said = f"there is no {exc}" if isinstance(exc, LookupError) else str(exc)
            raise UsageError(f"prefix {form!r} is no format: {said}", f"it may have {_NAMES}") from None

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(form: str | bool) -> Prefix:
        """The prefix of this format; True is the usual one."""
        return Prefix(DEFAULT if form is True else str(form))

    def before_lines(self, text: str, stream: Any) -> str:
        """`text` with the prefix at the start of each line, and of what a progress bar writes after a \\r."""
        if not text:
            return text
        started = _is_in_line(stream)
        if text[-1] in "\r\n":
            in_line.pop(id(stream), None)
        elif not started:
            in_line[id(stream)] = _held(stream)
        now = self._form.format(**whoami(), pid=os.getpid(), time=time.strftime("%H:%M:%S"))
        # After a newline always, after a \r only where something follows that can be seen: bars clear themselves.
        marked = _STARTS.sub(lambda start: start.group() + now, text)
        return marked if started or _BAR.match(text) else now + marked


# The streams, by id, where the last text with a prefix ended in the middle of a line. Each has a way to the stream
# beside it: the id of one that is gone may be another's by now, and that one's line has not begun.
in_line: dict[int, Callable[[], Any]] = {}


def _held(stream: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(stream)
    except TypeError:  # a class with __slots__
        return lambda: stream


def _is_in_line(stream: Any) -> bool:
    held = in_line.get(id(stream))
    return held is not None and held() is stream


def no_prefix(text: str, stream: Any) -> None:
    """Note that a text without a prefix goes to `stream`: it may end the line."""
    if text[-1:] in ("\r", "\n"):
        in_line.pop(id(stream), None)


_EXAMPLE = {"host": "node7", "rank": 0, "local_rank": 0, "world_size": 1, "pid": 4711, "time": "12:00:00"}
_NAMES = " ".join(f"{{{name}}}" for name in _EXAMPLE)
_STARTS = re.compile(r"\n(?=[^\r]|\r\n)|\r(?=[^\S\r\n]*[^\s])")
_BAR = re.compile(r"\r(?!\n)")
