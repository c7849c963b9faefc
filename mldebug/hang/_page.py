"""The page of memory that a job's agent shares with whoever looks at the job: a file of /dev/shm.

A folder of its own (mode 0700) holds for each process PID.page, and where they are asked for PID.record (the flight
record, as torch pickles it), PID.groups (the ranks of its groups), PID.stacks (what faulthandler wrote) and PID.threads
(names of threads).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile

SIZE = 64
# Eight 64-bit numbers. START guards against a process number that is used again.
MAGIC, START, BEAT, MARKS, STEP, ASKED, ANSWERED, SIGNAL = range(8)
SIGN = 0x6D6C646267310001
ENVIRONMENT = "MLDEBUG_AGENT"
WATCHED = "mldebug-watch-"  # and PID-START of the watch: the folder of a watched job
KINDS = ("page", "record", "record.new", "groups", "groups.new", "stacks", "threads", "threads.new")


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
    """When the process started, in ticks since the machine did: with its number it is unique. -1 where it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else -1


def _is_alive(pid: int | str) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _stat(pid: int | str) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()
    except OSError:
        return []


def reclaim_files(folder: str) -> bool:
    """Remove what processes that were killed left in a folder; returns whether no process uses it any more."""
    names = os.listdir(folder)
    alive = set()
    for name in names:
        pid = name.partition(".")[0]
        if name.endswith(".page") and _is_alive(pid):
            alive.add(pid)
    for name in names:
        pid, _, kind = name.partition(".")
        if pid.isdecimal() and kind in KINDS and pid not in alive:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    return not alive


def reclaim_folders() -> None:
    """Remove the folders of watches that were killed, where their job has ended too."""
    for base in {"/dev/shm", tempfile.gettempdir()}:
        with contextlib.suppress(OSError):
            for name in os.listdir(base):
                match = re.fullmatch(re.escape(WATCHED) + r"(\d+)-(\d+)-\w+", name)
                folder = os.path.join(base, name)
                if match is None or start_ticks(match[1]) == int(match[2]) or not is_private(folder, os.geteuid()):
                    continue
                with contextlib.suppress(OSError):
                    if reclaim_files(folder):
                        shutil.rmtree(folder, ignore_errors=True)
