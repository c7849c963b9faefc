"""Which files of a folder are of which rank: of the newest attempt of a job, its children, and what is missing."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from mldebug.core.errors import UsageError
from mldebug.tracing._files import NAME
from mldebug.tracing._ring_read import RingReader

NOT_READABLE = (OSError, EOFError, zlib.error, ValueError)


@dataclass
class Trace:
    """The files of one process, oldest piece first, and what their first line says."""

    rank: int
    host: str
    pid: int
    kind: str  # "txt" or "ring"
    pieces: list[str]
    world: int | None = None
    parent: int | None = None
    started: float = 0.0  # seconds since the epoch: where h:mm:ss is 0
    values: bool = False  # lines have values of arguments, which differ from rank to rank
    calls: bool = False  # there are calls only
    cut: bool = False  # the beginning is gone: older pieces were dropped, or the ring went round
    size: int = 0
    written: float = 0.0  # the time of the last write, by the file system
    sizes: list[int] = field(default_factory=list)
    ended: bool = False  # it was closed in order: nothing is to come

    @property
    def path(self) -> str:
        return self.pieces[-1]


@dataclass
class Found:
    """The traces of a job: one for each rank, and the others."""

    ranks: dict[int, Trace]
    world: int
    children: list[Trace]
    earlier: list[Trace]  # of earlier attempts, in the same folder
    unreadable: list[str]

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)


def find_traces(where: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Found:
    """Look at the names and first lines of all trace files in a folder, or of the files (or folders) given."""
    given = [where] if isinstance(where, (str, os.PathLike)) else list(where)
    names = [os.fspath(path) for path in given]
    paths: list[str] = []
    for name in names:
        paths += _inside(name) if os.path.isdir(name) else _single(name)
    traces, unreadable = [], []
    for pieces in _processes(paths):
        trace = _look(pieces)
        if trace is None:
            unreadable += pieces
        else:
            traces.append(trace)
    if not traces:
        what = names[0] if len(names) == 1 else f"{len(names)} files"
        raise UsageError(
            f"no trace in {what or '(nothing)'}: there is no trace-HOST-RANK-PID.txt or .ring with lines",
            "give the folder that `mldebug trace` wrote to; `mldebug trace --help` names it",
        )
    return _sort(traces, unreadable)


def _inside(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if NAME.fullmatch(entry.name)]
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise UsageError(f"cannot read the folder {folder}: {reason}", "give a folder that this user may read") from exc


def _single(path: str) -> list[str]:
    if not os.path.exists(path):
        raise UsageError(f"there is no file or folder {path}", "give the folder that `mldebug trace` wrote to")
    if not NAME.fullmatch(os.path.basename(path)):
        raise UsageError(
            f"{path} does not have the name of a trace",
            "names are trace-HOST-RANK-PID.txt, with .1.txt or .txt.gz, or .ring",
        )
    return [path]


def _processes(paths: Iterable[str]) -> list[list[str]]:
    """The files of each process, in order. Where a piece is there as text and compressed, the text is read."""
    groups: dict[tuple[str, ...], dict[float, str]] = {}
    for path in sorted(set(paths), reverse=True):  # .txt comes after .txt.gz, and wins
        match = NAME.fullmatch(os.path.basename(path))
        assert match is not None
        kind = "ring" if match["kind"] == "ring" else "txt"
        key = (os.path.dirname(path), match["host"], match["rank"], match["pid"], match["again"] or "", kind)
        number = float(match["piece"]) if match["piece"] else float("inf")
        groups.setdefault(key, {})[number] = path
    return [[pieces[number] for number in sorted(pieces)] for _, pieces in sorted(groups.items())]


def _look(pieces: list[str]) -> Trace | None:
    match = NAME.fullmatch(os.path.basename(pieces[0]))
    assert match is not None
    kind = "ring" if match["kind"] == "ring" else "txt"
    trace = Trace(int(match["rank"]), match["host"], int(match["pid"]), kind, pieces)
    try:
        stats = [os.stat(path) for path in pieces]
        trace.sizes = [stat.st_size for stat in stats]
        trace.size, trace.written = sum(trace.sizes), max(stat.st_mtime for stat in stats)
        if kind == "ring":
            reader = RingReader(pieces[0])
            line, trace.cut = reader.header, reader.is_full
            reader.close()
        else:
            line = first_line(pieces[0])
            trace.cut = b" piece=" in line
            if not line and len(pieces) == 1:
                return None
    except NOT_READABLE:
        return None
    _read_header(trace, line)
    return trace


def first_line(path: str) -> bytes:
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        data: bytes = file.read(8192)
    return data.partition(b"\n")[0]


def _read_header(trace: Trace, line: bytes) -> None:
    trace.started = trace.written
    if not line.startswith(b"# mldebug trace "):
        return
    before = line.decode("utf-8", "replace").partition(" argv=")[0]
    words = dict(word.split("=", 1) for word in before.split() if "=" in word)
    trace.host = words.get("host", trace.host)
    trace.world = _whole(words.get("world"))
    trace.parent = _whole(words.get("parent"))
    trace.calls = words.get("calls") == "1"
    trace.values = words.get("args") == "1"
    with contextlib.suppress(ValueError, OverflowError, OSError):
        trace.started = datetime.fromisoformat(words.get("started", "")).timestamp()


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else None


def _sort(traces: list[Trace], unreadable: list[str]) -> Found:
    """The newest trace of each rank is the rank's. A rank whose only trace ended before the newest attempt began is
    missing in it: its trace is one of an earlier attempt."""
    pids = {(trace.host, trace.rank, trace.pid) for trace in traces}
    children = [
        trace for trace in traces if (trace.host, trace.rank, trace.parent) in pids and trace.parent != trace.pid
    ]
    is_child = {id(trace) for trace in children}
    ranks: dict[int, Trace] = {}
    earlier: list[Trace] = []
    for trace in sorted(traces, key=lambda trace: (trace.started, trace.written, trace.pid)):
        if id(trace) in is_child:
            continue
        if trace.rank in ranks:
            earlier.append(ranks[trace.rank])
        ranks[trace.rank] = trace
    for rank in [rank for rank, trace in ranks.items() if _is_old(trace, ranks, earlier)]:
        earlier.append(ranks.pop(rank))
    mains = {(trace.host, trace.rank, trace.pid) for trace in ranks.values()}
    old = [child for child in children if not _descends(child, children, mains)]
    children = [child for child in children if child not in old]
    worlds = [trace.world for trace in ranks.values() if trace.world is not None]
    world = max([*worlds, max(ranks) + 1]) if max(worlds, default=0) <= _MOST_RANKS else max(ranks) + 1
    return Found(dict(sorted(ranks.items())), min(world, _MOST_RANKS), children, earlier + old, unreadable)


_MOST_RANKS = 10_000_000  # more than that is a file that is not what it says


def _is_old(trace: Trace, ranks: dict[int, Trace], earlier: list[Trace]) -> bool:
    """Whether it ran beside a trace that another rank has a newer one of, and had ended before that began."""
    return any(
        trace.written < ranks[other.rank].started - 1 and trace.started <= other.written
        for other in earlier
        if other.rank in ranks
    )


def _descends(child: Trace, children: list[Trace], mains: set[tuple[str, int, int]]) -> bool:
    """Whether the child is one of the main processes', or of their children's."""
    by_pid = {(trace.host, trace.rank, trace.pid): trace for trace in children}
    seen: set[int | None] = set()
    current: Trace | None = child
    while current is not None and current.parent not in seen:
        seen.add(current.parent)
        assert current.parent is not None
        above = (current.host, current.rank, current.parent)
        if above in mains:
            return True
        current = by_pid.get(above)
    return False
