"""The lock that printing goes through: among the processes of a job on this node, and among the threads of each."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import mmap
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Collection

from mldebug.ranks._lock_file import left_behind, open_lock_file, remove_lock_file

BOUND = 5.0  # seconds that a holder may stand still with an output that takes more
SLOTS = 512  # outputs that are told apart; two that share a slot only wait for each other now and then

# What take() returns, for free().
NOTHING, THREAD, BOTH = 0, 1, 2


class PrintLock:
    """One lock for each output of a job on this node: a byte, its slot, of one file that all processes open.

    The kernel releases it when its holder dies. One that stands still (stopped, in a debugger, stuck in other code)
    for `bound` seconds while the output takes more is passed by: take() says so once and returns without the lock.
    A full pipe is waited for, as any print waits for it. A signal handler may take it again in the same thread.

        had = LOCK.take(slot, fd)  # fd: the output, to see whether it takes more; -1 where there is none
        try: write()
        finally: LOCK.free(slot, had)
    """

    def __init__(self) -> None:
        self._threads = threading.RLock()
        self._fd = -1
        self._opened: dict[str, int] = {}  # the descriptor that _fd is, or is going to be
        self._file: os.stat_result | None = None
        self._checked = 0.0  # when it was seen that the file is still the one that all agree on
        # Of each slot its last holder, as pid << 32 | turn: tells a busy lock from a stuck one.
        self._holders = memoryview(bytearray(8 * SLOTS)).cast("Q")
        self._map: mmap.mmap | None = None
        self._held: dict[int, int] = {}  # slot -> how many times, by the thread that owns _threads
        self._turns = 0
        self._me = os.getpid() << 32
        self._passed_by: dict[int, int] = {}  # slot -> the holder that stood still
        self._pause = _SHORTEST
        self._waited = 0.0  # when somebody else had the lock
        self._without = False  # there is no lock file to be had, which has been said
        self._leaving = False
        self._at_fork: list[bool] = []

    def take(self, slot: int, fd: int, bound: float = BOUND) -> int:
        """Wait for the lock of `slot`."""
        if not self._threads.acquire(False) and not self._take_thread(fd, bound):
            return NOTHING
        held = self._held
        held[slot] = held.get(slot, 0) + 1
        try:
            self._turns += 1
            # A handler that interrupted its own thread asks too, as what it interrupted may be waiting.
            lock = self._fd
            if lock < 0 or time.monotonic() - self._checked > 1.0 or not _try(lock, slot):
                return self._take_slowly(slot, fd, bound)
            self._holders[slot] = self._me | self._turns
            return BOTH
        except BaseException:
            self.free(slot, BOTH)
            raise

    def free(self, slot: int, had: int) -> None:
        """Release what take() returned."""
        if had == NOTHING:
            return
        count = self._held.get(slot, 1) - 1
        if count:
            self._held[slot] = count
        else:
            self._held.pop(slot, None)
            if self._fd >= 0:
                _unlock(self._fd, slot, self._held)
            if self._leaving:
                self.leave()
        self._threads.release()

    def leave(self) -> None:
        """At the end of the process: close the file, and remove it where no other process has it open."""
        self._leaving = True
        if self._fd >= 0 and not self._held:
            fd = self._fd
            self._forget()
            ours = self._is_ours(fd)
            self._unmap(ours)
            if ours:
                if _alone(fd):
                    remove_lock_file(fd)
                os.close(fd)

    def before_fork(self) -> None:
        """Let a print of another thread come to its end, so that the child does not begin in the middle of it."""
        self._at_fork.append(self._threads.acquire(timeout=1.0))

    def after_fork_in_parent(self) -> None:
        if self._at_fork.pop():
            self._threads.release()

    def after_fork_in_child(self) -> None:
        """The threads that held anything are not here, and the open file is shared with the parent, lock and all."""
        if self._fd >= 0:
            ours = self._is_ours(self._fd)
            self._unmap(ours)
            if ours:
                os.close(self._fd)
        leaving, without = self._leaving, self._without
        self.__init__()  # type: ignore[misc]
        self._leaving, self._without = leaving, without

    def _take_thread(self, fd: int, bound: float) -> bool:
        turns = self._turns
        # A second more than the thread that holds it may wait for another process.
        while not self._threads.acquire(timeout=bound + 1.0):
            if turns == self._turns and _takes_more(fd):
                _say_unlocked(f"a thread of this process has stood still while printing for {bound + 1.0:g} s")
                return False
            turns = self._turns
        return True

    def _take_slowly(self, slot: int, fd: int, bound: float) -> int:
        if len(self._held) > 1:  # who has this slot may be waiting for the other one that this thread has
            bound = min(bound, 1.0)
        for _attempt in range(2):
            lock = self._open()
            if lock < 0:
                break
            if _try(lock, slot) or self._wait(lock, slot, fd, bound):
                self._holders[slot] = self._me | self._turns
                return BOTH
            if self._is_ours(lock):
                break
            self._forget()  # a program that closes all descriptors has closed it just now
        return THREAD

    def _wait(self, lock: int, slot: int, fd: int, bound: float) -> bool:
        """Ask again and again: the kernel's own waiting has no bound, and changes the process for every line.

        Pauses grow, and stay long while the lock is busy: then one process at a time prints line after line, and the
        others sleep, which is several times faster than taking turns."""
        holder = self._holders[slot]
        if holder == self._passed_by.get(slot):
            return False
        looked = now = time.monotonic()
        deadline = now + bound
        if now - self._waited > 2 * self._pause:  # it is not always as busy as that
            self._pause = _SHORTEST
        while True:
            time.sleep(self._pause * (0.5 + (time.perf_counter_ns() & 1023) / 1024))  # apart from the others
            now = time.monotonic()
            if _try(lock, slot):
                self._waited = now
                return True
            self._pause = min(self._pause * 2, _LONGEST)
            if now - looked < 0.02:
                continue
            looked = now
            if self._holders[slot] != holder or not _takes_more(fd):
                holder, deadline = self._holders[slot], now + bound
            elif now > deadline:
                self._passed_by[slot] = holder
                who = f"pid {holder >> 32}" if holder else "a process"
                _say_unlocked(f"{who} has held the lock for printing for {bound:g} s and writes nothing")
                return False

    def _open(self) -> int:
        """The lock file, opened anew where it is not the one that all agree on any more."""
        if self._fd >= 0 and not self._is_ours(self._fd):
            self._forget()
        if self._fd < 0 and not self._without:
            fd = open_lock_file(8 * SLOTS)
            if fd < 0:
                self._without = True
                _say_unlocked("there is no private folder for a lock file (set XDG_RUNTIME_DIR or TMPDIR to one)")
                return -1
            # A signal handler that prints just now opens it as well, and its lock is this thread's: were there two
            # descriptors, one would wait for the other for good. The first stays, by one step that nothing interrupts.
            stays = self._opened.setdefault("fd", fd)
            if stays != fd:
                os.close(fd)
            if _SET is not None:
                with contextlib.suppress(OSError):
                    fcntl.fcntl(stays, _SET, _SHARED)
            self._unmap(ours=False)
            with contextlib.suppress(OSError, ValueError):
                self._map = mmap.mmap(stays, 8 * SLOTS)
                self._holders = memoryview(self._map).cast("Q")
            self._file = os.fstat(stays)
            self._fd = stays
            _sweep()
        self._checked = time.monotonic()
        return self._fd

    def _forget(self) -> None:
        """In this order: a handler in between opens the file anew, and what it opened is found by _open()."""
        self._opened.clear()
        self._fd = -1

    def _unmap(self, ours: bool) -> None:
        """The map has a descriptor of its own, which keeps the file open, and with it the locks. Where a program has
        closed all descriptors that number may be another file's by now: then the map is kept, unused."""
        if self._map is not None:
            self._holders = memoryview(bytearray(8 * SLOTS)).cast("Q")
            if ours:
                with contextlib.suppress(BufferError):  # a thread looks at it just now
                    self._map.close()
            else:
                _kept.append(self._map)
            self._map = None

    def _is_ours(self, fd: int) -> bool:
        """Whether `fd` is the file that all agree on. A cleaner may have removed it; a program may have closed the
        descriptor, and opened a file of its own, which is not to be touched."""
        try:
            state = os.fstat(fd)
        except OSError:
            return False
        if self._file is None or not os.path.samestat(state, self._file):
            return False
        if state.st_nlink == 0:
            os.close(fd)
            return False
        return True


_SHORTEST, _LONGEST = 0.0001, 0.04  # seconds between two tries
_kept: list[mmap.mmap] = []
_PRESENT = SLOTS  # the byte that every process with the file open holds together with the others
_SET = getattr(fcntl, "F_OFD_SETLK", None)  # locks of a byte, owned by the open file: Linux
_whole_file = _SET is None  # else one lock of the whole file, which is right too and coarser


def _try(fd: int, slot: int) -> bool:
    global _whole_file
    try:
        if _SET is None or _whole_file:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, _SET, _LOCKS[slot])
        return True
    except OSError as exc:
        if exc.errno == errno.EINVAL and not _whole_file:  # a kernel without them
            _whole_file = True
            return _try(fd, slot)
        return False


def _unlock(fd: int, slot: int, held: Collection[int]) -> None:
    try:
        if _SET is None or _whole_file:
            if not held:
                fcntl.flock(fd, fcntl.LOCK_UN)
        else:
            fcntl.fcntl(fd, _SET, _UNLOCKS[slot])
    except OSError:  # a program that closes all descriptors has closed it
        pass


def _requests(kind: int) -> list[bytes]:
    """For each byte struct flock, its offsets of 64 bits."""
    return [struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0) for byte in range(SLOTS + 1)]


_LOCKS, _UNLOCKS = _requests(fcntl.F_WRLCK), _requests(fcntl.F_UNLCK)
_SHARED = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _PRESENT, 1, 0)


def _alone(fd: int) -> bool:
    """Whether no other process has the file open; then none can come in between either, until it is closed."""
    return not _whole_file and _try(fd, _PRESENT)


def _sweep() -> None:
    """Remove the files of jobs that were killed: nobody has them open."""
    for path in left_behind():
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _alone(fd):
                    os.unlink(path)
            finally:
                os.close(fd)


def _takes_more(fd: int) -> bool:
    """Whether a write would go on at once. If not, who writes waits for the reader, and so would we."""
    if fd < 0:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def say(what: str) -> None:
    """To stderr, around the lock: a line that waited for it could not say so."""
    stream = getattr(sys.stderr, "_mldebug_stream", sys.stderr)
    with contextlib.suppress(Exception):
        stream.write(f"mldebug: {what}\n")
        stream.flush()


def _say_unlocked(why: str) -> None:
    say(f"printing without the lock, lines may mix: {why}")


LOCK = PrintLock()
atexit.register(LOCK.leave)
os.register_at_fork(
    before=LOCK.before_fork,
    after_in_parent=LOCK.after_fork_in_parent,
    after_in_child=LOCK.after_fork_in_child,
)
