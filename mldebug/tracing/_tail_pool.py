"""Reads many traces at a time, by processes that are forked where that is asked for."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Callable

from mldebug.tracing._tail_find import Trace
from mldebug.tracing._tail_index import Index, index
from mldebug.tracing._tail_read import Place

Task = tuple[int, Trace, Place]


def read_all(
    tasks: list[Task], matcher: re.Pattern[bytes] | None, processes: int, progress: Callable[[int], None]
) -> dict[int, Index]:
    """The index of each rank's trace. More than one process is for programs that may be forked: one thread, no GPU."""
    processes = min(processes, len(tasks))
    if processes < 2 or sum(trace.size for _, trace, _ in tasks) < _WORTH:
        return {rank: index(trace, place, matcher, progress) for rank, trace, place in tasks}
    found: dict[int, Index] = {}
    tasks = sorted(tasks, key=lambda task: -task[1].size)  # the large ones first, so that all end together
    with multiprocessing.get_context("fork").Pool(processes, _prepare, (matcher,)) as pool:
        for rank, one in pool.imap_unordered(_read, tasks):
            found[rank] = one
            progress(one.trace.size)
    return {rank: found[rank] for rank in sorted(found)}


_WORTH = 32 << 20  # bytes; less is read before processes are forked
_matcher: re.Pattern[bytes] | None = None


def _prepare(matcher: re.Pattern[bytes] | None) -> None:
    global _matcher
    _matcher = matcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children


def _read(task: Task) -> tuple[int, Index]:
    rank, trace, place = task
    return rank, index(trace, place, _matcher, lambda count: None)
