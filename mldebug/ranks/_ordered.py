"""Printing in the order of ranks, through the store of the process group: no collective, so nothing that can hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mldebug.ranks._lock import say
from mldebug.ranks._prefix import process_group

WAIT = 10.0  # seconds that a rank may come later than another


@contextmanager
def in_order(print_ranks: Collection[int] | None, wait: float | None = None) -> Iterator[None]:
    """Enter when the ranks before this one have left. Without a process group, at once."""
    dist = process_group()
    turn = None
    if dist is not None and (print_ranks is None or dist.get_rank() in print_ranks):
        turn = _Turn.next(dist, print_ranks, WAIT if wait is None else wait)
        turn.bounded(turn.wait)
    try:
        yield
    finally:
        if turn is not None:
            turn.bounded(turn.done)


class _Turn:
    """The n-th ordered print of this process.

    Each rank notes in the store which one it has come to, and which one it has done. A rank that makes fewer of these
    calls than others is waited for once, and then expected to stay behind by as many.
    """

    _store: Any = None
    _count = 0
    _behind: dict[int, int] = {}  # noqa: RUF012  # of this process, as its count is
    _dead = False
    _lock = threading.Lock()

    def __init__(self, store: Any, rank: int, before: list[int], count: int, wait: float) -> None:
        self._mine, self._rank, self._before, self._n, self._seconds = store, rank, before, count, wait

    @classmethod
    def next(cls, dist: Any, print_ranks: Collection[int] | None, wait: float) -> _Turn:
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        with cls._lock:
            if cls._store is not store:
                cls._store, cls._count, cls._behind, cls._dead = store, 0, {}, False
            cls._count += 1
            before = [one for one in range(rank) if print_ranks is None or one in print_ranks]
            return cls(store, rank, before, cls._count, wait)

    def bounded(self, step: Any) -> None:
        """Run a step in a thread: the store's own waiting has no bound where its server stands still."""
        if _Turn._dead:
            return
        failed: list[BaseException] = []

        def run() -> None:
            try:
                step()
            except Exception as exc:
                failed.append(exc)

        thread = threading.Thread(target=run, name="mldebug-ordered-print", daemon=True)
        thread.start()
        thread.join(3 * self._seconds)
        if thread.is_alive() or failed:
            _Turn._dead = True
            why = f"failed ({failed[0]})" if failed else "does not answer"
            say(f"printing in any order from here on: the store of the process group {why}")

    def wait(self) -> None:
        self._note("come")
        missing = []
        deadline = time.monotonic() + self._seconds
        for rank in reversed(self._before):
            # One that has come waits itself, for those before it, and is through in as long again.
            if self._is_done(rank, deadline):
                break
            if self._reached("come", rank) and self._is_done(rank, time.monotonic() + self._seconds):
                break
            missing.append(rank)
            _Turn._behind[rank] = self._n - self._read("done", rank)
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
            say(f"rank {self._rank} prints without waiting for {ranks}: no ordered print there in {self._seconds:g} s")

    def done(self) -> None:
        self._note("done")

    def _is_done(self, rank: int, deadline: float) -> bool:
        pause = 0.001
        while not self._reached("done", rank):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.05)
        return True

    def _reached(self, what: str, rank: int) -> bool:
        return self._read(what, rank) >= self._n - _Turn._behind.get(rank, 0)

    def _note(self, what: str) -> None:
        self._mine.set(_key(what, self._rank), str(self._n))

    def _read(self, what: str, rank: int) -> int:
        key = _key(what, rank)
        return int(self._mine.get(key)) if self._mine.check([key]) else 0


def _key(what: str, rank: int) -> str:
    """Restarted processes of an elastic job count anew, in the store of before."""
    return f"mldebug/ordered/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}/{rank}"
