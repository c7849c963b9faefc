"""Reads what a job's agent shows, from outside."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import pickle
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mldebug.core.stacks import Stacks, process_state
from mldebug.hang._page import (
    ANSWERED,
    ASKED,
    BEAT,
    MAGIC,
    MARKS,
    SIGN,
    SIGNAL,
    SIZE,
    START,
    STEP,
    folder_for,
    is_private,
    start_ticks,
)
from mldebug.hang._source import is_library

if TYPE_CHECKING:
    from mldebug.hang._evidence import Call, Frame, GroupInfo, Progress, Record

_MOST = 1_000_000  # bytes of stacks by signal, until they are thrown away
_FRAMES = 12  # of a call that are kept, of the program


class Reader:
    """The agent of one process, seen from outside. Where there is none all of it answers with nothing."""

    def __init__(self, pid: int, environment: str | None) -> None:
        self._pid = pid
        self._asked = 0
        self._steps: list[int] = []
        self._beats: list[int] = []
        self._page: memoryview | None = None
        with contextlib.suppress(OSError, ValueError):
            uid = os.stat(f"/proc/{pid}").st_uid
            folder = folder_for(environment, uid)
            self._stem = os.path.join(folder, str(pid))
            if is_private(folder, uid):
                self._page = _map(f"{self._stem}.page", pid)

    def sample(self) -> None:
        if self._page is not None:
            self._beats.append(self._page[BEAT])
            if self._page[MARKS]:
                self._steps.append(self._page[STEP])

    def progress(self) -> Progress | None:
        found: Progress = {}
        if len(set(self._beats)) > 1 or any(self._beats):
            found["heartbeat"] = self._beats
        if self._steps:
            found["step"] = self._steps
        return found or None

    def ask(self) -> None:
        """Ask for the flight record; the agent writes it while we look at the stacks."""
        if self._page is not None and self._page[BEAT]:
            self._asked = self._page[ASKED] + 1
            self._page[ASKED] = self._asked

    def record(self, deadline: float) -> Record | None:
        """The flight record that was asked for, if it comes in time."""
        page = self._page
        if page is None or not self._asked or process_state(self._pid) in ("", "Z", "X", "T", "t"):
            return None
        while page[ANSWERED] < self._asked:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        try:
            with open(f"{self._stem}.record", "rb") as stream:
                return read_record(stream.read(), self._groups())
        except (OSError, pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError):
            return None

    def stacks_by_signal(self, refused: Stacks) -> Stacks:
        """The stacks that faulthandler writes, where py-spy could not read them; else what py-spy said."""
        page = self._page
        number = page[SIGNAL] if page is not None else 0
        if not number or not _catches(self._pid, number) or process_state(self._pid) in ("", "Z", "X", "T", "t"):
            return refused
        with contextlib.suppress(OSError):
            path = f"{self._stem}.stacks"
            before = os.path.getsize(path)
            if before > _MOST:
                os.truncate(path, 0)  # it is written at its end, wherever that is
                before = 0
            os.kill(self._pid, number)
            text = _grown(path, before)
            if text:
                return Stacks("ok", "by signal: " + refused.why, _parse(text, self._names()))
        return refused

    def _groups(self) -> dict[str, list[int]]:
        with (
            contextlib.suppress(OSError, ValueError, TypeError, AttributeError),
            open(f"{self._stem}.groups", "rb") as stream,
        ):
            return {str(name): [int(rank) for rank in ranks] for name, ranks in json.load(stream).items()}
        return {}

    def _names(self) -> dict[int, tuple[str, int]]:
        with contextlib.suppress(OSError, ValueError, TypeError), open(f"{self._stem}.threads", "rb") as stream:
            table = json.load(stream)
            return {int(ident): (str(name), int(native)) for ident, (name, native) in table.items()}
        return {}


def read_record(data: bytes, members: Mapping[str, list[int]] | None = None) -> Record:
    """A dump of torch's flight recorder as evidence. Only plain values are unpickled: a dump comes from the job.

    `members` are the ranks of groups, by name.
    """
    raw = _Plain(io.BytesIO(data)).load()
    entries = [entry for entry in raw["entries"] if isinstance(entry, dict)]
    groups: dict[str, GroupInfo] = {name: {"desc": "", "ranks": ranks} for name, ranks in (members or {}).items()}
    calls: list[Call] = []
    for entry in entries:
        name, desc = (*map(str, entry["process_group"]), "")[:2]
        groups.setdefault(name, {"desc": desc, "ranks": _ranks(raw, name)})["desc"] = desc
        p2p = bool(entry.get("is_p2p"))
        call: Call = {
            "group": name,
            "seq": int(entry["p2p_seq_id" if p2p else "collective_seq_id"]),
            "op": _op(str(entry["profiling_name"])),
            "done": bool(entry.get("retired")) or entry.get("state") == "completed",
            "sizes": [[int(length) for length in size] for size in entry.get("input_sizes", [])],
            "frames": _frames(entry.get("frames", [])),
        }
        if p2p:
            call["p2p"] = True
        calls.append(call)
    whole = not entries or entries[0].get("record_id") == 0
    return {"calls": calls, "whole": whole, "groups": groups}


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight record has no {module}.{name} in it")


def _op(name: str) -> str:
    """`gloo:all_reduce` is all_reduce, and what NCCL does for a barrier is that barrier."""
    op = name.partition(":")[2] or name
    return "barrier" if op == "all_reduce_barrier" else op


def _frames(raw: list[dict[str, Any]]) -> list[Frame]:
    """The call itself and the program's own lines, from the nearest to the outermost: what is between says nothing."""
    frames: list[Frame] = [
        {"name": str(one["name"]), "file": str(one["filename"]), "line": int(one["line"])} for one in raw
    ]
    own = [frame for frame in frames[1:] if not is_library(frame["file"])] or frames[-1:]
    if len(own) > _FRAMES:
        own = [*own[: _FRAMES - 1], own[-1]]
    return frames[:1] + own


def _ranks(raw: dict[str, Any], name: str) -> list[int]:
    ranks = raw.get("pg_config", {}).get(name, {}).get("ranks", "")
    return [int(number) for number in re.findall(r"\d+", str(ranks))]


def _map(path: str, pid: int) -> memoryview | None:
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size != SIZE:
            return None
        page = memoryview(mmap.mmap(handle, SIZE)).cast("q")
    finally:
        os.close(handle)
    return page if page[MAGIC] == SIGN and page[START] == start_ticks(pid) else None


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, which would end it otherwise."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
        match = re.search(r"^SigCgt:\s*([0-9a-f]+)", stream.read(), re.M)
        return match is not None and bool(int(match.group(1), 16) >> (number - 1) & 1)
    return False


def _grown(path: str, before: int, patience: float = 1.0) -> str:
    """What is written behind `before`, once it grows no more."""
    size, deadline = before, time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(0.03)
        now = os.path.getsize(path)
        if now == size and now > before:
            break
        size = now
    with open(path, "rb") as stream:
        stream.seek(before)
        return stream.read().decode("utf-8", "replace")


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _parse(text: str, names: dict[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Threads in the form of py-spy. faulthandler lists the oldest thread last: the main one."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            ident = int(match.group(1), 16)
            name, native = names.get(ident, ("", 0))
            threads.append({"name": name, "tid": native, "active": False, "gil": False, "frames": []})
        elif threads and (match := _FRAME.match(line)):
            frame = {"name": match.group(3), "file": match.group(1), "line": int(match.group(2))}
            threads[-1]["frames"].append(frame)
    if threads and not any(thread["name"] == "MainThread" for thread in threads):
        threads[-1]["name"] = "MainThread"
    return threads
