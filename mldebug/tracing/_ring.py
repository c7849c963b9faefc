"""The last lines of a process in a file of fixed size that is mapped into memory, so that they outlive the process.

Writing a line is two or three stores into memory, and no call of the system:

    n = next(counter)                                    # counts from 0
    record = (monotonic_ns() << 12 & TIME) | thread << 22 | ref
    slots[n & mask] = last[thread] = record
    head[0] = n

A record is 64 bits: 32 of the clock in units of 2**20 ns (about a millisecond, 52 days before they repeat), 10 of the
thread, 22 of the text. Texts are stored once, by `define`; those that differ each time (values of arguments, code that
is made while the program runs) go by `value` through a part of the file that is a ring too. So the file never grows.

The newest record is at `head`, or a few slots behind it where another thread was killed between its two stores: the
clock in the records tells. `last` has the newest record of each thread, however long ago that was.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib

from mldebug.core.errors import UsageError
from mldebug.tracing._files import create, header, make_folder, now, warn
from mldebug.tracing._lines import shorten

TIME = 0xFFFF_FFFF_0000_0000
THREAD_SHIFT = 22
THREADS = 1024
SMALLEST = 1 << 20


class Ring:
    """The file `trace-{host}-{rank}-{pid}.ring` in `folder`: `size` bytes, all allocated before the first store.

    On a disk without room, or one that cannot be mapped, this raises OSError after a warning: the caller goes without.
    (A file with holes would kill the job by SIGBUS when the disk fills up.) A folder that cannot be made, and a size
    below 1 MiB, are UsageErrors.
    `timing`, `log_pid` and `threads` say what the reader puts before a line.

        ring = Ring("/scratch/traces", 64 << 20)
        ref = ring.define(b"train.py:    12: loss.backward()", context=call)
    """

    slots: memoryview  # of "Q"
    last: memoryview  # of "Q", one for each thread
    head: memoryview  # of "Q", one
    mask: int
    _texts_used: int
    _values_used: int
    _threads_used: int

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int,
        *,
        timing: bool = True,
        log_pid: bool = False,
        threads: bool = False,
        note: str = "",
    ) -> None:
        if size < SMALLEST:
            raise UsageError(
                f"a ring of {size} bytes is too small", "give it 1 MiB or more; 64 MiB holds 4 million lines"
            )
        self.folder = os.path.abspath(folder)
        self._size, self._note = size, note
        self._flags = timing * TIMING | log_pid * LOG_PID | threads * SHOW_THREADS
        self._parent: int | None = None
        make_folder(self.folder)
        try:
            self._open()
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            warn(f"no ring of {size >> 20} MiB in {self.folder}: {reason}; the job goes on without a trace")
            raise

    def define(self, text: bytes, context: int = 0, timed: bool = True) -> int:
        """Store a text for good and return its ref. 0: there is no more room for texts; use `value` each time then.

        `context` is the ref of the call that a line belongs to: the reader shows the call again where it changes.
        A text without one that is not `timed` is such a call. `timed` texts are shown with the time in front.
        """
        entry = _entry(text, context, timed)
        size = len(entry)
        # Room is taken without a lock, on which a signal handler might wait for ever: between these two lines is no
        # call and no jump, and so no switch to another thread or a handler.
        at = self._texts_used
        self._texts_used = at + size
        if at + size > self._layout.texts_size:
            return 0
        start = self._layout.texts + at
        self._map[start : start + size] = entry
        return at // UNIT

    def value(self, text: bytes, context: int = 0, timed: bool = True) -> int:
        """Store a text that is used for one record, over the oldest one, and return its ref."""
        entry = _entry(text, context, timed)
        size, room = len(entry), self._layout.values_size
        at = self._values_used  # as in define
        at *= at + size <= room
        self._values_used = at + size
        start = self._layout.values + at
        self._map[start : start + size] = entry
        return VALUES | at // UNIT

    def thread(self, name: str) -> int:
        """The index of a new thread. From the 1,023rd on they share one."""
        index = self._threads_used  # as in define
        self._threads_used = index + 1
        index = min(index, THREADS - 1)
        shown = name if index < THREADS - 1 else "more threads"
        data = shown.encode("utf-8", "backslashreplace").replace(b"\n", b" ")[:NAME_SIZE]
        start = NAMES + index * NAME_SIZE
        self._map[start : start + NAME_SIZE] = data.ljust(NAME_SIZE, b"\0")
        return index

    def close(self) -> None:
        """Note in the file that its process ended in order. What threads still store lands in it as before."""
        ended = struct.pack("<q", time.time_ns())
        self._map[ENDED_AT : ENDED_AT + len(ended)] = ended

    def after_fork(self) -> bool:
        """In a child: a ring of its own, an eighth in size; `slots`, `last`, `head` and all refs are new.

        False, after a warning, if that cannot be: the stores of the child go nowhere then.
        """
        self._parent = self._pid
        self._size = max(SMALLEST, self._size // 8)
        try:
            self._open()
        except OSError as exc:
            warn(
                f"no ring for the child {os.getpid()}: {(exc.strerror or str(exc)).lower()}; it goes on without a trace"
            )
            self._use(mmap.mmap(-1, Layout(SMALLEST).end), Layout(SMALLEST))
            return False
        return True

    def _open(self) -> None:
        layout = Layout(self._size)
        self._pid = os.getpid()
        self.path, fd = create(self.folder, "ring", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            _allocate(fd, layout.end)
            map_ = mmap.mmap(fd, layout.end)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(fd)
        wall, clock = time.time_ns(), time.monotonic_ns()
        line = header(started=now(), parent=self._parent, note=self._note)[: HEADER_SIZE - HEAD.size - 1]
        fields = (layout.slots, layout.count, layout.texts, layout.texts_size, layout.values, layout.values_size)
        map_[HEAD.size : HEAD.size + len(line)] = line
        map_[: HEAD.size] = HEAD.pack(MAGIC, self._flags, self._pid, wall, clock, len(line), *fields)
        self._use(map_, layout)

    def _use(self, map_: mmap.mmap, layout: Layout) -> None:
        self._map, self._layout = map_, layout
        self._texts_used, self._values_used, self._threads_used = UNIT, 0, 0  # no text has ref 0
        words = memoryview(map_).cast("Q")
        self.slots = words[layout.slots // 8 : layout.slots // 8 + layout.count]
        self.last = words[LAST // 8 : LAST // 8 + THREADS]
        self.head = words[HEAD_AT // 8 : HEAD_AT // 8 + 1]
        self.mask = layout.count - 1


# The layout, which the reader (_ring_read.py) shares.

MAGIC = b"mldebug trace ring 1\n".ljust(24, b"\0")
HEAD = struct.Struct(
    "<24sIIqqI4x6Q"
)  # magic, flags, pid, wall and monotonic ns at the start, length of the line, parts
TIMING, LOG_PID, SHOW_THREADS = 1, 2, 4
HEAD_AT = 4096 - 8
ENDED_AT = HEAD_AT - 8  # wall ns, or 0
HEADER_SIZE = ENDED_AT
LAST = 4096
NAMES = LAST + THREADS * 8
NAME_SIZE = 64
FIRST = NAMES + THREADS * NAME_SIZE

UNIT = 16  # texts begin at multiples of this, so that 21 bits reach 32 MiB
VALUES = 1 << 21  # refs from here on are of values
REFS = (1 << THREAD_SHIFT) - 1
ENTRY = struct.Struct("<IHH")  # context, length with TIMED, check; the text follows
TIMED = 0x8000
LONGEST = 4000


class Layout:
    """Where the parts of a ring file of about `size` bytes begin: half is slots, the rest texts and values."""

    def __init__(self, size: int) -> None:
        self.count = 1 << ((size // 16).bit_length() - 1)
        self.slots = FIRST
        self.texts = self.slots + self.count * 8
        room = max(size - self.texts, SMALLEST // 4) // 2 // 4096 * 4096
        self.texts_size = self.values_size = min(room, VALUES * UNIT)
        self.values = self.texts + self.texts_size
        self.end = self.values + self.values_size


def check(text: bytes) -> int:
    return zlib.crc32(text) & 0xFFFF


def _entry(text: bytes, context: int, timed: bool) -> bytes:
    text = shorten(text.rstrip(b"\n"), LONGEST)
    entry = ENTRY.pack(context, len(text) | timed * TIMED, check(text)) + text
    return entry + b"\0" * (-len(entry) % UNIT)


def _allocate(fd: int, size: int) -> None:
    """Have the disk give all blocks now, or raise OSError."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
        block = b"\0" * (1 << 20)
        for at in range(0, size, len(block)):
            data = block[: size - at]
            if os.pwrite(fd, data, at) != len(data):
                raise OSError(28, "No space left on device") from exc


_UNSUPPORTED = (22, 38, 95)  # EINVAL, ENOSYS, EOPNOTSUPP: file systems that cannot reserve
