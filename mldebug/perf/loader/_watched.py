"""A dataset and a collate_fn that leave word of what they are at, so that a failure has the index of its sample."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.data as data

from mldebug.core.stacks import process_state

IDLE, READS, COLLATES, FAILED = range(4)
_FIELDS = 5  # state, index (or -1: see the text), since when in nanoseconds, digests of a stream's first two samples
_TEXT = 200  # bytes for an index that is no number


class Board:
    """Memory that workers share with their parent: a few numbers and a text for each of them."""

    def __init__(self, workers: int) -> None:
        self.workers = max(1, workers)
        self._numbers = multiprocessing.RawArray(ctypes.c_longlong, self.workers * _FIELDS)
        self._texts = multiprocessing.RawArray(ctypes.c_char, self.workers * _TEXT)
        self.mine = 0  # the number of the worker that this copy is in
        self.broken = False  # something was raised here: torch lets a worker go on, and the first failure must stay

    def enter(self, state: int, index: Any) -> None:
        if self.broken:
            return
        at = self.mine * _FIELDS
        if type(index) is int:
            self._numbers[at + 1] = index
        else:
            self._numbers[at + 1] = -1
            text = (index if isinstance(index, str) else repr(index)).encode("utf-8", "replace")[: _TEXT - 1]
            ctypes.memmove(ctypes.addressof(self._texts) + self.mine * _TEXT, text + b"\0", len(text) + 1)
        self._numbers[at + 2] = time.monotonic_ns()
        self._numbers[at] = state

    def leave(self) -> None:
        if not self.broken:
            self._numbers[self.mine * _FIELDS] = IDLE

    def failed(self) -> None:
        """What was entered last has raised. A failed read has a state of its own."""
        at = self.mine * _FIELDS
        if not self.broken and self._numbers[at] == READS:
            self._numbers[at] = FAILED
        self.broken = True

    def digest(self, number: int, sample: Any) -> None:
        """Note what a stream begins with, so that streams that begin alike are found."""
        with contextlib.suppress(Exception):  # not everything can be pickled
            self._numbers[self.mine * _FIELDS + 3 + number] = zlib.crc32(pickle.dumps(sample)) + 1

    def all_alike(self) -> bool:
        """Whether the streams of all workers began with the same two samples, which differ from each other."""
        pairs = {tuple(self._numbers[at + 3 : at + 5]) for at in range(0, self.workers * _FIELDS, _FIELDS)}
        first, second = pairs.pop()
        return self.workers > 1 and not pairs and 0 < first != second > 0

    def has_begun(self, worker: int) -> bool:
        """Whether a worker has come to its first sample."""
        return bool(self._numbers[worker * _FIELDS + 2])

    def look(self, worker: int) -> tuple[int, str, float]:
        """What a worker is at: its state, the index in words, and for how many seconds."""
        state, index, since = self._numbers[worker * _FIELDS : worker * _FIELDS + 3]
        if index == -1:
            text = ctypes.string_at(ctypes.addressof(self._texts) + worker * _TEXT, _TEXT)
            words = text.partition(b"\0")[0].decode("utf-8", "replace")
        else:
            words = str(index)
        return state, words, (time.monotonic_ns() - since) / 1e9


class Watched(data.Dataset[Any]):
    """A map-style dataset of which each sample is noted before it is read."""

    def __init__(self, inner: Any, board: Board) -> None:
        self.inner, self.board = inner, board

    def __getitem__(self, index: Any) -> Any:
        self.board.enter(READS, index)
        try:
            return self.inner[index]
        except BaseException:
            self.board.failed()
            raise


class WatchedBatches(Watched):
    """The same for a dataset that reads a batch at once. The sample that fails is looked for one by one."""

    def __getitems__(self, indices: list[Any]) -> Any:
        self.board.enter(READS, f"{indices[0]} to {indices[-1]}" if len(indices) > 1 else indices[0])
        try:
            return self.inner.__getitems__(indices)
        except BaseException:
            for index in indices:
                self.board.enter(READS, index)
                try:
                    self.inner.__getitems__([index])
                except BaseException:
                    break
            self.board.failed()
            raise


class WatchedStream(data.IterableDataset[Any]):
    """An iterable dataset, over and over: the end of its epoch must not end a measurement."""

    def __init__(self, inner: Any, board: Board) -> None:
        self.inner, self.board = inner, board

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            before = number
            self.board.enter(READS, number)
            try:
                for sample in self.inner:
                    if number < 2:
                        self.board.digest(number, sample)
                    yield sample
                    number += 1
                    self.board.enter(READS, number)
            except GeneratorExit:
                raise
            except BaseException:
                self.board.failed()
                raise
            if number == before:  # an empty shard
                self.board.leave()
                return


class WatchedCollate:
    """A collate_fn that notes that it is at work."""

    def __init__(self, inner: Callable[[Any], Any], board: Board) -> None:
        self.inner, self.board = inner, board

    def __call__(self, samples: Any) -> Any:
        _, words, _ = self.board.look(self.board.mine)
        self.board.enter(COLLATES, words)
        try:
            batch = self.inner(samples)
        except BaseException:
            self.board.failed()
            raise
        self.board.leave()
        return batch


class Begin:
    """The worker_init_fn: takes the worker's place on the board, and lets the user's own function see its dataset."""

    def __init__(self, inner: Callable[[int], Any] | None, board: Board) -> None:
        self.inner, self.board = inner, board

    def __call__(self, worker: int) -> None:
        die_with_parent()
        self.board.mine = worker  # this copy of it, which dataset and collate_fn have too
        info = data.get_worker_info()
        assert info is not None  # torch calls this in workers only
        inner = info.dataset.inner  # type: ignore[attr-defined]
        object.__setattr__(info, "dataset", inner)  # it refuses to be set in the plain way
        if self.inner is not None:
            self.inner(worker)


def die_with_parent() -> None:
    """Linux ends this process when its parent ends, whatever ended that, and whatever this one is stuck in."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        parent = multiprocessing.parent_process()
        if parent is not None and process_state(parent.pid or 0) in ("", "Z", "X"):
            os._exit(1)  # it ended before this one could ask for that
