"""breakpoint_on: pdb on one rank, with a terminal, while the others wait for it."""

from __future__ import annotations

import atexit
import bdb
import pdb
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.ranks._alive import Beat, Pause, Watched, card, named
from mldebug.ranks._board import Board, board_for, write_quietly
from mldebug.ranks._site import base_of, caller, count, function_of, site_of
from mldebug.ranks._terminal import Terminal, find_terminal
from mldebug.ranks._world import Who, who

_SAY_AFTER = 10.0  # seconds until a waiting rank says that the held one has not come


def breakpoint_on(
    rank: int | Sequence[int] = 0,
    *,
    header: str | None = None,
    condition: bool | Callable[[], object] = True,
    timeout: float | None = None,
    store: Any = None,
) -> None:
    """Stop in pdb on one rank, in the code that calls this; the others wait here until it goes on. Call it on all.

    They wait without a collective, so no timeout of NCCL runs. Of a list of ranks one is held after the other.
    In pdb: `c` lets all go on; `release` lets the others go on while this rank steps (needed before it steps over a
    collective); `q` and Ctrl-D end the job with status 1. Under torchrun too, pdb has the terminal; where there is none
    (srun, a job in the background) it is reached through a socket, by the command that is printed on stderr.
    `header` is shown first. `condition`, a value or a function, is asked on the held rank only: if false nothing stops.
    The others give up with an MldebugError when the held rank ends, or `timeout` seconds are over (default: never).

        loss = model(batch)
        breakpoint_on(rank=3, condition=lambda: loss.isnan())
    """
    me = who()
    ranks = [rank] if isinstance(rank, int) else list(rank)
    for one in ranks:
        if not 0 <= one < me.size:
            raise UsageError(f"there is no rank {one} to hold: the job has {me.size}", "ranks count from 0")
    frame = caller()
    if not ranks or frame is None:
        return
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "leave it out to wait for ever")
    if me.size == 1:
        if _holds(condition):
            _stop(frame, find_terminal(me), header, None)
        return
    board = board_for(me, node_only=False, store=store)
    base = base_of(me, f"breakpoint/{function_of(frame)}")
    line = _Line(board, f"{base}/{count(base)}", me, list(dict.fromkeys(ranks)), site_of(frame), timeout)
    if me.rank not in ranks:
        line.wait(ranks)
        return
    line.wait(ranks[: ranks.index(me.rank)])
    if not _holds(condition):
        line.pass_by()
        return
    line.hold()
    try:
        _stop(frame, find_terminal(me), header, line)
    except BaseException:
        line.release("out")
        raise


def _holds(condition: bool | Callable[[], object]) -> bool:
    return bool(condition() if callable(condition) else condition)


def _stop(frame: FrameType, terminal: Terminal, header: str | None, line: _Line | None) -> None:
    debugger = _Pdb(terminal, line)
    if header:
        debugger.message(header)
    debugger.start(frame)  # it stops when we are back in that frame


class _Line:
    """One call: the ranks that are held, one after the other, and what the others see of them."""

    def __init__(self, board: Board, key: str, me: Who, ranks: list[int], site: str, timeout: float | None) -> None:
        self._board, self._key, self._me, self._ranks, self._site = board, key, me, ranks, site
        self._timeout = timeout
        self._beat: Beat | None = None

    def hold(self) -> None:
        self._board.write(self._name(self._me.rank), {**card(self._me), "state": "in", "site": self._site})
        self._beat = Beat(self._board, f"{self._name(self._me.rank)}/beat")
        atexit.register(self.release, "out")  # the program may end while somebody steps through it
        time.sleep(0.5)  # so that what the others say does not come into the first prompt

    def pass_by(self) -> None:
        self._board.write(self._name(self._me.rank), {**card(self._me), "state": "out", "site": self._site})
        self.wait(self._ranks[self._ranks.index(self._me.rank) + 1 :])

    def release(self, state: str) -> None:
        """Let the others go on ("out"), or end ("quit"). Once; later calls do nothing."""
        if self._beat is None:
            return
        self._beat.stop()
        self._beat = None
        atexit.unregister(self.release)
        write_quietly(self._board, self._name(self._me.rank), {**card(self._me), "state": state, "site": self._site})

    def wait_for_rest(self) -> None:
        """A rank that was held waits for those that are held after it."""
        self.wait(self._ranks[self._ranks.index(self._me.rank) + 1 :])

    def wait(self, ranks: Sequence[int]) -> None:
        for one in ranks:
            self._wait_for(one)

    def _name(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    def _wait_for(self, rank: int) -> None:
        begin = time.monotonic()
        watched, pause = Watched(self._board, f"{self._name(rank)}/beat"), Pause(self._me.size)
        said = missed = False
        while True:
            note = self._board.read(self._name(rank))
            waited = time.monotonic() - begin
            if note is None and not missed and waited > _SAY_AFTER:
                missed = True
                self._say(f"waits at {self._site} for rank {rank}, which has not come there to be held")
            if note is not None and note["state"] == "in" and (why := watched.is_gone(note)):
                note = self._board.read(self._name(rank)) or note
                if note["state"] == "in":
                    raise MldebugError(
                        f"{named(note)} {why} while it was held in the debugger at {note['site']}; rank "
                        f"{self._me.rank} waited for it",
                        "start the job again",
                    )
            if note is not None and note["state"] == "in" and not said:
                said = True
                self._say(f"waits at {self._site}: {named(note)} is held in the debugger")
            if note is not None and note["state"] == "out":
                return
            if note is not None and note["state"] == "quit":
                self._say(f"ends, as {named(note)} was told to quit in the debugger")
                raise SystemExit(1)
            if self._timeout is not None and waited > self._timeout:
                what = f"{named(note)}, which is held in the debugger" if note else f"rank {rank}, which never came"
                raise MldebugError(
                    f"rank {self._me.rank} has waited {waited:.0f} s at {self._site} for {what}",
                    "call breakpoint_on on all ranks, and give it more time: timeout=",
                )
            pause()

    def _say(self, what: str) -> None:
        sys.stderr.write(f"mldebug: rank {self._me.rank} {what}\n")  # print writes the end of the line apart
        sys.stderr.flush()


class _Pdb(pdb.Pdb):
    """pdb that tells the others when it lets go, and ends a job with one line and no traceback."""

    def __init__(self, terminal: Terminal, line: _Line | None) -> None:
        # nosigint: Ctrl-C stays what the program made of it. skip: what we do before we are back is not to be seen.
        super().__init__(stdin=terminal.stdin, stdout=terminal.stdout, nosigint=True, skip=["mldebug.ranks.*"])
        self.prompt = "(Pdb) " if line is None else f"(Pdb rank {line._me.rank}) "
        self._terminal, self._others = terminal, line
        self._traced: list[tuple[FrameType, Any]] = []
        self._tracer: Any = None
        self._outermost: FrameType | None = None

    def start(self, frame: FrameType) -> None:
        one: FrameType | None = frame
        while one is not None:
            self._traced.append((one, one.f_trace))
            self._outermost, one = one, one.f_back
        self._tracer = sys.gettrace()
        self.set_trace(frame)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        try:
            tracer = super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            sys.settrace(None)
            raise SystemExit(1) from None  # programs catch Exception, of which BdbQuit is one
        if event == "return" and frame.f_back is None and frame is self._outermost:
            self.set_continue()  # the program is over: what Python does then is of no interest
        return tracer

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:  # whoever traced before us traces again
            for frame, tracer in self._traced:
                if tracer is not None:
                    frame.f_trace = tracer
            sys.settrace(self._tracer)
            self._terminal.close()
        self._traced.clear()
        if self._others is not None:
            self._others.release("out")
            self._others.wait_for_rest()

    def set_quit(self) -> None:
        super().set_quit()
        self._traced.clear()
        if self._others is not None:
            self._others.release("quit")
        self._terminal.close()

    def cmdloop(self, intro: Any = None) -> None:
        try:
            super().cmdloop(intro)
        except KeyboardInterrupt:
            if self._others is None:
                raise  # pdb shows its prompt again
            self.message("")
            self.do_quit("")  # the launcher has got the Ctrl-C as well, and ends the job

    def do_release(self, arg: str) -> None:
        """release

        Let the other ranks go on, while this one stays in the debugger.
        """
        if self._others is not None:
            self._others.release("out")
        self.message("the other ranks go on")
