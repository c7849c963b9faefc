"""The page of memory that a job's agent shares with whoever looks at the job: a file of /dev/shm.

A folder of its own (mode 0700) holds for each process PID.page, and where they are asked for PID.record (the flight
record, as torch pickles it), PID.stacks (what faulthandler wrote) and PID.threads (names of threads).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

SIZE = 64
# Eight 64-bit numbers. START guards against a process number that is used again.
MAGIC, START, BEAT, MARKS, STEP, ASKED, ANSWERED, SIGNAL = range(8)
SIGN = 0x6D6C646267310001
ENVIRONMENT = "MLDEBUG_AGENT"


def folder_for(value: str | None, uid: int) -> str:
    """Where agents write: the absolute path that MLDEBUG_AGENT gives, or a folder of the user."""
    if value and os.path.isabs(value):
        return value
    base = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(base, f"mldebug-{uid}")


def is_private(folder: str, uid: int) -> bool:
    """Whether only that user can have put files there; others are not believed."""
    with contextlib.suppress(OSError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022
    return False


def start_ticks(pid: int | str) -> int:
    """When the process started, in ticks since the machine did: with its number it is unique."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1
