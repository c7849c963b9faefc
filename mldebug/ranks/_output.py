"""LockedOutput: all that a program prints comes out in whole lines, without an edit of the program."""

from __future__ import annotations

import builtins
import functools
import logging
import sys
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.scope import Scope
from mldebug.ranks._lines_out import LineStream, plain_stream
from mldebug.ranks._lock import BOUND
from mldebug.ranks._ordered import in_order
from mldebug.ranks._prefix import Prefix, in_line, no_prefix, whoami
from mldebug.ranks._printflock import as_text
from mldebug.ranks._write import is_plain, write_whole


class LockedOutput(Scope):
    """Inside of it `print` is printflock, in every module, where it prints to stdout or stderr.

    stdout, stderr: also what is written to sys.stdout, sys.stderr by other means (progress bars, tracebacks, pdb), line
        by line: what has no newline yet waits for it, or for a flush.
    logging: also the handlers of `logging` that write to stdout, stderr or a file.
    prefix, print_ranks, ordered: as printflock has them. The prefix is for stdout and stderr; print_ranks is for
        stdout, so that no traceback is lost; ordered is for print, and all ranks have to print equally often then.
    timeout: seconds after which a process that holds the lock and stands still is passed by.

    What a program writes to the descriptors itself (C code, a subprocess) is not touched. Processes that are forked
    inside are in it, those that are spawned are not. At the end everything is what it was.

        with LockedOutput(stderr=True, logging=True, prefix="[{host}:{rank}]"):
            train()
    """

    def __init__(
        self,
        *,
        stdout: bool = False,
        stderr: bool = False,
        logging: bool = False,
        prefix: str | bool | None = None,
        print_ranks: Collection[int] | None = None,
        ordered: bool = False,
        timeout: float = BOUND,
    ) -> None:
        if not timeout > 0:
            raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "5 is usual")
        self._wrapped = [name for name, wanted in (("stdout", stdout), ("stderr", stderr)) if wanted]
        self._logging = logging
        self._prefix = Prefix.of(prefix) if prefix else None
        self._print_ranks, self._ordered, self._timeout = print_ranks, ordered, timeout
        self._streams: dict[str, LineStream] = {}
        self._befores: dict[str, Any] = {}
        self._handlers: list[tuple[Any, Any, LineStream]] = []
        self._known: list[Any] = []
        self._stderr: Any = None
        self._print: Any = None
        self._init: Any = None  # of logging.StreamHandler

    def start(self) -> None:
        self._streams, self._befores, self._handlers = {}, {}, []
        self._known = [plain_stream(stream) for stream in (sys.stdout, sys.stderr) if stream is not None]
        self._stderr = plain_stream(sys.stderr)
        for name in self._wrapped:
            before = getattr(sys, name)
            if before is not None:
                self._befores[name] = before
                self._streams[name] = self._lines(before)
                setattr(sys, name, self._streams[name])
        if self._logging:
            self._wrap_handlers()
        self._print = _replacement(self, builtins.print)
        builtins.print = self._print

    def stop(self, exc: BaseException | None) -> None:
        ours, before = self._print, self._print.before
        ours.over = True
        # What somebody else has put over ours meanwhile stays; ours is only a way through then.
        if builtins.print is ours:
            builtins.print = _still_on(before)
        for name, stream in self._streams.items():
            stream.end()
            if getattr(sys, name) is stream:
                setattr(sys, name, _still_on(self._befores[name]))
        self._unwrap_handlers()

    def show(self, text: str, stream: Any) -> None:
        """One text to stdout or stderr."""
        if self._print_ranks is not None and stream is not self._stderr and whoami()["rank"] not in self._print_ranks:
            return
        if self._prefix is not None:
            text = self._prefix.before_lines(text, stream)
        elif in_line:
            no_prefix(text, stream)
        write_whole(stream, text, self._timeout)

    def print(self, text: str, stream: Any) -> None:
        """What print was called with, if it goes to stdout or stderr."""
        with in_order(self._print_ranks) if self._ordered else nullcontext():
            if stream in self._streams.values():
                stream.write(text)
                stream.flush()
            else:
                if isinstance(stream, LineStream):  # of a scope around this one
                    stream.flush()
                self.show(text, plain_stream(stream))

    def is_known(self, stream: Any) -> bool:
        """Whether it is stdout or stderr; one that a program made anew counts, one that collects text does not."""
        plain = plain_stream(stream)
        return any(plain is one for one in self._known) or (is_plain(plain) and plain.fileno() in (1, 2))

    def _lines(self, stream: Any) -> LineStream:
        plain = plain_stream(stream)
        show = self.show if self.is_known(plain) else functools.partial(_show_whole, timeout=self._timeout)
        return LineStream(plain, show)

    def _wrap_handlers(self) -> None:
        """Those that are there, and those that are made from now on."""
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in {id(one): one for logger in loggers for one in getattr(logger, "handlers", ())}.values():
            self._wrap_handler(handler)
        before = _handlers.__init__

        @functools.wraps(before)
        def init(handler: Any, *args: Any, **kwargs: Any) -> None:
            before(handler, *args, **kwargs)
            if not init.over:  # type: ignore[attr-defined]
                self._wrap_handler(handler)

        init.over, init.before = False, before  # type: ignore[attr-defined]
        _handlers.__init__ = self._init = init

    def _wrap_handler(self, handler: Any) -> None:
        if not isinstance(handler, logging.StreamHandler) or "stream" not in vars(handler):
            return
        before = handler.stream
        if before is None or before in self._streams.values():
            return
        if self.is_known(before) or is_plain(plain_stream(before)):
            stream: Any = self._lines(before)
            self._handlers.append((handler, before, stream))
            handler.setStream(stream)

    def _unwrap_handlers(self) -> None:
        if self._init is not None:
            ours, before, self._init = self._init, self._init.before, None
            ours.over = True
            if _handlers.__init__ is ours:
                _handlers.__init__ = _still_on(before)
        for handler, before, stream in self._handlers:
            stream.end()
            if handler.stream is stream:
                handler.setStream(_still_on(before))


_handlers: Any = logging.StreamHandler  # where type checkers would rather see no change


def _show_whole(text: str, stream: Any, timeout: float) -> None:
    write_whole(stream, text, timeout)


def _replacement(scope: LockedOutput, before: Any) -> Any:
    """A function of the same name, as programs may look at it."""

    @functools.wraps(print)
    def show(*args: Any, sep: Any = " ", end: Any = "\n", file: Any = None, flush: Any = False) -> None:
        stream = sys.stdout if file is None else file
        if show.over or stream is None or not scope.is_known(stream):  # type: ignore[attr-defined]
            _still_on(before)(*args, sep=sep, end=end, file=file, flush=flush)
            return
        scope.print(as_text(args, sep, end), stream)

    show.over, show.before = False, before  # type: ignore[attr-defined]
    return show


def _still_on(before: Any) -> Any:
    """What was there before, without those of us whose scope has ended in between."""
    while getattr(before, "over", False) is True and hasattr(before, "before"):
        before = before.before
    while isinstance(before, LineStream) and before.ended:
        before = before._mldebug_stream
    return before
