"""Facts about processes that only /proc knows: CPU ticks, file locks, pipes, where in the kernel they wait."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldebug.hang._evidence import Lock, Pipe


def ticks_of(pid: int) -> int:
    """Clock ticks of CPU that the process used since its start."""
    return _ticks(f"/proc/{pid}/stat")


def thread_ticks(pid: int, tids: Iterable[int]) -> dict[int, int]:
    return {tid: _ticks(f"/proc/{pid}/task/{tid}/stat") for tid in tids if tid}


def switches_of(pid: int, tid: int) -> int:
    """How often a thread gave up its core to wait for something: each time that it woke up in between."""
    match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", _text(f"/proc/{pid}/task/{tid}/status"), re.M)
    return int(match.group(1)) if match else 0


def io_of(pid: int, tid: int) -> int:
    """Bytes that a thread read and wrote, sockets left aside; 0 where this is not told."""
    found = re.findall(r"^(?:rchar|wchar|read_bytes|write_bytes): (\d+)", _text(f"/proc/{pid}/task/{tid}/io"), re.M)
    return sum(map(int, found))


def wchan_of(pid: int) -> str:
    """The place in the kernel where the main thread waits; "0" or "" where it does not, or where this is not told."""
    return _text(f"/proc/{pid}/wchan").strip()


def locks_of(pids: Collection[int]) -> list[Lock]:
    """The file locks that these processes hold or want.

    /proc/locks has the process that took a lock, and a waiter below the lock that it waits for:

        1: FLOCK  ADVISORY  WRITE 711 08:01:5242 0 EOF
        1: -> FLOCK  ADVISORY  WRITE 712 08:01:5242 0 EOF
    """
    found: list[Lock] = []
    for line in _text("/proc/locks").splitlines():
        words = line.split()[1:]
        waits = words[:1] == ["->"]
        words = words[1:] if waits else words
        if len(words) < 5 or not words[3].isdecimal() or int(words[3]) not in pids:
            continue
        lock: Lock = {"pid": int(words[3]), "kind": words[0], "inode": words[4], "waits": waits}
        if file := _file_of(lock["pid"], lock["inode"]):
            lock["file"] = file
        found.append(lock)
    return found


def shared_pipes(pids: Collection[int]) -> dict[int, list[Pipe]]:
    """The open ends of pipes by process, of pipes that more than one of these processes has."""
    ends: dict[int, list[Pipe]] = {}
    users: dict[str, set[int]] = {}
    for pid in pids:
        for fd, target in _files(pid):
            if target.startswith("pipe:["):
                inode = target[6:-1]
                users.setdefault(inode, set()).add(pid)
                ends.setdefault(pid, []).append({"fd": fd, "inode": inode, "write": _is_writable(pid, fd)})
    shared = {inode for inode, having in users.items() if len(having) > 1}
    return {pid: kept for pid, pipes in ends.items() if (kept := [pipe for pipe in pipes if pipe["inode"] in shared])}


def _ticks(path: str) -> int:
    fields = _text(path).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _file_of(pid: int, inode: str) -> str:
    """The path of a lock's file, among those that the process has open."""
    number = inode.rpartition(":")[2]
    for fd, target in _files(pid):
        with contextlib.suppress(OSError):
            if target.startswith("/") and str(os.stat(f"/proc/{pid}/fd/{fd}").st_ino) == number:
                return target
    return ""


def _files(pid: int) -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append((int(fd), os.readlink(f"/proc/{pid}/fd/{fd}")))
    return found


def _is_writable(pid: int, fd: int) -> bool:
    for line in _text(f"/proc/{pid}/fdinfo/{fd}").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
