"""Whether a process that others wait for still lives: by its pid on the same node, by a beat elsewhere."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from mldebug.ranks._board import Board, Note, write_quietly
from mldebug.ranks._files import node, ticks
from mldebug.ranks._world import Who, host

BEAT = 10.0  # seconds between two beats
SILENCE = 120.0  # without a beat: lost. Code that keeps the GIL for long keeps the beat from coming


def card(me: Who) -> Note:
    """What a process writes of itself for those that will wait for it."""
    return {"rank": me.rank, "host": host(), "pid": os.getpid(), "ticks": ticks(os.getpid()), "node": node()}


def named(note: Note) -> str:
    """That process in words."""
    return f"rank {note.get('rank')} (host {note.get('host')}, pid {note.get('pid')})"


class Beat:
    """Says every few seconds that this process lives, from a thread, until it is stopped."""

    def __init__(self, board: Board, name: str) -> None:
        self._end = threading.Event()
        self._arguments = (board, name)
        threading.Thread(target=self._run, name="mldebug-beat", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _run(self) -> None:
        board, name = self._arguments
        count = 0
        while not self._end.wait(BEAT):
            count += 1
            write_quietly(board, name, {"beat": count})


class Watched:
    """Another process, as one that waits for it sees it."""

    def __init__(self, board: Board, name: str) -> None:
        self._board, self._name = board, name
        self._beat: Any = None
        self._heard = time.monotonic()
        self._looked = self._heard

    def is_gone(self, note: Note) -> str:
        """Why it is no longer there, or "" while it is. `note` is its `card`."""
        if note.get("node") and note["node"] == node():
            return "" if ticks(int(note["pid"])) == note["ticks"] else "has ended (killed, or by os._exit)"
        now = time.monotonic()
        if now - self._looked > BEAT / 2:
            self._looked = now
            beat = self._board.read(self._name)
            if beat != self._beat:
                self._beat, self._heard = beat, now
        return f"has not been heard of for {SILENCE:.0f} s" if now - self._heard > SILENCE else ""


class Pause:
    """Sleeps between two looks at a board: short at first, and longer the more ranks look."""

    def __init__(self, size: int) -> None:
        self._next, self._most = 0.005, max(0.3, size / 2000)

    def __call__(self) -> None:
        time.sleep(self._next)
        self._next = min(self._next * 1.5, self._most)
