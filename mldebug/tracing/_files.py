"""The text file of one traced process: whole lines by one write each, rotated by size, and never the end of the job."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import resource
import sys
import threading
from collections.abc import Iterator
from datetime import datetime

from mldebug.core.errors import UsageError
from mldebug.core.world import world
from mldebug.tracing._compress import Compressor, remove


class TraceFile:
    """An open file `trace-{host}-{rank}-{pid}.txt` in `folder`, which is made where it is missing.

    `write` hands whole lines to the kernel at once, so they outlive a SIGKILL of this process. With `rotate` a file
    that has grown to that many bytes becomes a piece `...{pid}.1.txt`, `.2.txt` and so on (the highest is the newest),
    of which the newest `keep` stay; with `compress` they become `.txt.gz` in the background.
    What fails later (a full disk, a folder that is gone) is one warning on stderr, and nothing more is written.
    A folder that cannot be written is a UsageError.

        file = TraceFile("/scratch/traces", rotate=64 << 20, keep=4, compress=True)
        file.write(b"0:00:01 train.py:    12: loss.backward()\\n")
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rotate: int | None = None,
        keep: int = 10,
        compress: bool = False,
        note: str = "",
    ) -> None:
        self.folder = os.path.abspath(folder)
        self.path = ""
        self.fd = -1
        self.piece = 1  # the number of the file that is being written; it changes when the context must be said again
        self.stopped = False  # nothing is written any more: the disk is full, say
        self._rotate, self._keep, self._compress, self._note = rotate, keep, compress, note
        self._parent: int | None = None
        self._started = now()
        self._lock = threading.Lock()
        self._compressor = Compressor() if compress else None
        make_folder(self.folder)
        try:
            self._open()
        except OSError as exc:
            if self.path:
                remove(self.path)  # its first line did not fit
            raise cannot_write(self.folder, exc) from exc

    def write(self, data: bytes) -> None:
        """Hand `data`, one or more whole lines, to the kernel. Never raises for a disk that is full or gone."""
        try:
            done = os.write(self.fd, data)
            while done < len(data):
                done += os.write(self.fd, data[done:])
        except OSError as exc:
            self._failed(exc, data)
            return
        self._size += done
        if self._size >= self._rotate_at:
            self._turn()

    def close(self) -> None:
        """Write that the trace ended in order, and close; waits some seconds for pieces that are being compressed."""
        if self.fd >= 0:
            self.write(END + f" {now()}\n".encode())
            fd, self.fd = self.fd, -1
            self.stopped = True
            os.close(fd)
        if self._compressor is not None:
            self._compressor.close()

    def after_fork(self) -> None:
        """In a child: go on in a file of its own, whose first line names the parent. A failure is a warning."""
        if self.stopped:
            return
        self._lock = threading.Lock()  # the other one may be held by a thread that is not here
        if self._compressor is not None:
            self._compressor = Compressor()
        self._parent, self._started = self._pid, now()
        try:
            self._open()
        except OSError as exc:
            self._stop(f"cannot open a trace file for the child {os.getpid()}: {_reason(exc)}")

    def _open(self) -> None:
        """Make a new file; one that this process has open already keeps its number and points to the new one."""
        self._pid = os.getpid()
        self.path, fd = create(self.folder, "txt")
        self.piece = 1
        self._take(fd)

    def _take(self, fd: int) -> None:
        if self.fd >= 0:
            os.dup2(fd, self.fd, inheritable=False)  # at once for threads that are writing
            os.close(fd)
        else:
            self.fd = lift(fd)
        head = header(started=self._started, piece=self.piece, parent=self._parent, note=self._note)
        self._size = len(head)
        self._limit_size()
        os.write(self.fd, head)

    def _limit_size(self) -> None:
        """Where `ulimit -f` is set, a write beyond it is a signal, which kills a job that asked for its default."""
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._rotate_at = self._most = float("inf") if limit == resource.RLIM_INFINITY else max(0, limit - _MARGIN)
        if self._rotate is not None:
            self._rotate_at = min(self._rotate, self._most)

    def _turn(self) -> None:
        """The file is a finished piece now, and a new one is begun. After a SIGKILL in between no line is missing."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is at it, or this one and a signal handler came in between: write on
        try:
            if self._size < self._rotate_at or self.stopped:
                return
            if self._rotate is None:
                self._stop(f"stopped writing {self.path}: it reached the limit of the file size (ulimit -f)")
                return
            stem = self.path[: -len(".txt")]
            piece = f"{stem}.{self.piece}.txt"
            with contextlib.suppress(FileNotFoundError):  # deleted while it was written
                os.rename(self.path, piece)
            fd = os.open(self.path, _FLAGS, 0o644)
            self.piece += 1
            self._take(fd)
            if self._compressor is not None:
                self._compressor.add(piece)
            for path in (f"{stem}.{self.piece - 1 - self._keep}.txt{end}" for end in ("", ".gz")):
                if os.path.exists(path):
                    os.unlink(path)
        except OSError as exc:
            self._stop(f"stopped writing {self.path}: {_reason(exc)}")
        finally:
            self._lock.release()

    def _failed(self, exc: OSError, data: bytes) -> None:
        if self.stopped:
            return
        if exc.errno == errno.EBADF and self._reopen():  # the program closed every descriptor, as daemons do
            self.write(data)
            return
        self._stop(f"stopped writing {self.path}: {_reason(exc)}")

    def _reopen(self) -> bool:
        try:
            self.fd = lift(os.open(self.path, _FLAGS & ~os.O_EXCL, 0o644))
        except OSError:
            return False
        return True

    def _stop(self, message: str) -> None:
        """Say so once, and let what threads still write go nowhere."""
        self.stopped = True
        self._rotate_at = float("inf")
        with contextlib.suppress(OSError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.fd, inheritable=False)
            os.close(null)
        warn(f"{message}; the job goes on without a trace")


# What this file knows about names and first lines, the ring and the reader know from here.

NAME = re.compile(
    r"trace-(?P<host>.+)-(?P<rank>\d+)-(?P<pid>\d+)(?:_(?P<again>\d+))?(?:\.(?P<piece>\d+))?\.(?P<kind>txt|txt\.gz|ring)"
)

END = b"# mldebug trace end"

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MARGIN = 1 << 16
_HIGH = 800  # descriptors from here on are not what a program's next open() gets when it has closed them all


def create(folder: str, ending: str, flags: int = _FLAGS) -> tuple[str, int]:
    """A new file for this process in `folder`: its path and descriptor. A name that was used gets `_2`, `_3` ..."""
    me = world()
    host = re.sub(r"[^\w.-]", "_", me.host) or "host"
    for path in _names(os.path.join(folder, f"trace-{host}-{me.rank}-{os.getpid()}"), ending):
        try:
            return path, os.open(path, flags, 0o644)
        except FileExistsError:
            continue
    raise AssertionError("names do not end")


def _names(stem: str, ending: str) -> Iterator[str]:
    yield f"{stem}.{ending}"
    again = 2
    while True:
        yield f"{stem}_{again}.{ending}"
        again += 1


def header(*, started: str, piece: int = 1, parent: int | None = None, note: str = "") -> bytes:
    """The first line of each file: who this is, and when the clock of its lines began.

    `parent` is the traced process that a child was forked from.
    """
    me = world()
    words = [f"# mldebug trace 1 host={me.host} rank={me.rank} world={me.world_size} pid={os.getpid()}"]
    words += [f"parent={parent}"] if parent is not None else []
    words += [f"piece={piece}"] if piece > 1 else []
    words += [f"started={started} python={platform.python_version()}"]
    words += [note] if note else []
    words += [f"argv={json.dumps(sys.argv)[:2000]}"]
    return " ".join(words).replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n"


def now() -> str:
    """The time of day with its zone, in milliseconds."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as exc:
        raise cannot_write(folder, exc) from exc


def cannot_write(folder: str, exc: OSError) -> UsageError:
    return UsageError(f"cannot write traces to {folder}: {_reason(exc)}", "choose another folder, on a disk with room")


def lift(fd: int) -> int:
    """The same file under a high descriptor, so that a program which closes ours does not get its number anew."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return fd  # the limit is lower
    os.close(fd)
    return high


def warn(message: str) -> None:
    """A line on stderr, past sys.stderr: the traced program may be inside a print."""
    with contextlib.suppress(OSError):
        os.write(2, f"mldebug: {message}\n".encode("utf-8", "backslashreplace"))


def _reason(exc: OSError) -> str:
    return (exc.strerror or str(exc)).lower()
