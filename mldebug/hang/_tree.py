"""Ends a job with everything that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence

from mldebug.hang._find import Process, children_of, descendants, processes
from mldebug.hang._page import ENVIRONMENT

_SET_SUBREAPER, _GET_SUBREAPER = 36, 37  # of prctl

_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


class Adopting:
    """While entered, processes below this one that lose their parent become its children, and so are found again.

    with Adopting() as adopted:
        job = subprocess.Popen(command)
        while job.poll() is None:
            adopted.bury(besides=job.pid)
    """

    def __init__(self) -> None:
        self._spared: set[int] = set()
        self._before = ctypes.c_int(0)

    def __enter__(self) -> Adopting:
        self.spare()
        _prctl(_GET_SUBREAPER, ctypes.byref(self._before))
        _prctl(_SET_SUBREAPER, 1)
        return self

    def __exit__(self, *_: object) -> None:
        _prctl(_SET_SUBREAPER, self._before.value)

    def bury(self, besides: int) -> None:
        """Bury the adopted that have ended, but for the one whose status somebody waits for."""
        for pid in _own_children() - self._spared - {besides}:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def spare(self) -> None:
        """The children that are there now are those of the program that we are part of."""
        self._spared |= _own_children()


def _own_children() -> set[int]:
    """The children of the main thread, where that is the one that asks: orphans come to it. Those of other threads
    are in lists of their own, and somebody waits for them."""
    if threading.current_thread() is threading.main_thread():
        path = f"/proc/self/task/{os.getpid()}/children"
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as listed:
            return set(map(int, listed.read().split()))
    return set()


def _prctl(option: int, value: object) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def members(top: int, folder: str) -> dict[int, Process]:
    """The processes of a job: those below its first one, and those that inherited its MLDEBUG_AGENT."""
    everything = processes()
    below = children_of(everything)
    found = {pid for pid in (top, *descendants(top, below)) if pid in everything}
    for one in everything.values():
        if one.env.get(ENVIRONMENT) == folder and one.uid == os.geteuid():
            found.update(pid for pid in (one.pid, *descendants(one.pid, below)))
    found.discard(os.getpid())
    return {pid: everything[pid] for pid in found}


def end_job(top: int, folder: str, grace: float = 3.0) -> list[int]:
    """End all processes of a job: asked first, killed after `grace` seconds; returns the numbers of those that stay."""
    first = members(top, folder)
    known = {pid: one.start for pid, one in first.items()}
    # The launcher last: it would start to clean up by itself, which takes it half a minute.
    for pid in sorted(first, reverse=True):
        if pid != top:
            _send(pid, signal.SIGTERM)
            _send(pid, signal.SIGCONT)  # one that is stopped cannot end
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and _alive(known, besides=top):
        _reap(known, besides=top)
        time.sleep(0.05)
    for turn in range(50):
        here = members(top, folder)
        for pid, one in here.items():
            known.setdefault(pid, one.start)
        # These remove what others left in shared memory, and end by themselves once those have.
        spared = {pid for pid, one in here.items() if any(word in one.line for word in _CLEANERS)} if turn < 20 else ()
        for pid in _alive(known):
            if pid not in spared:
                _send(pid, signal.SIGKILL)
        _reap(known, besides=top)
        if not _alive(known):
            break
        time.sleep(0.05)
    return _alive(known)


def end_ranks(pids: Sequence[int], grace: float = 3.0) -> list[int]:
    """End ranks with all that they started, but for this process; their launcher stays to see it."""
    everything = processes()
    below = children_of(everything)
    found = {one for pid in pids for one in (pid, *descendants(pid, below, {os.getpid()})) if one in everything}
    known = {pid: everything[pid].start for pid in found - {os.getpid()}}
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 3.0)):
        for pid in _alive(known):
            _send(pid, number)
            _send(pid, signal.SIGCONT)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _alive(known):
            time.sleep(0.05)
    return _alive(known)


def _alive(known: dict[int, float], besides: int = 0) -> list[int]:
    """Those of these processes that are there still; a number that is used again has another start."""
    everything = processes()
    return [
        pid
        for pid, start in known.items()
        if pid != besides
        and pid in everything
        and abs(everything[pid].start - start) < 1
        and not _ended(everything[pid])
    ]


def _ended(one: Process) -> bool:
    """A zombie whose parent is not ours is its parent's to bury."""
    return one.state in "ZX"


def _reap(known: dict[int, float], besides: int) -> None:
    """Bury those that have ended and became our children, but for the one whose status somebody waits for."""
    for pid in known:
        if pid != besides:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)
