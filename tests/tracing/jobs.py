"""Traces of made-up jobs, for tests and benchmarks of reading them."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path

STARTED = datetime(2026, 3, 1, 12, 0, 0, tzinfo=timezone.utc)
CALL = "        train:1 main"


def line(number: int, source: str, file: str = "train.py") -> str:
    return f"{file}:{number:>6}: {source}"


def loop(steps: int, body: Callable[[int], Iterable[str]]) -> list[str]:
    """A call, and for each step the line of the loop and those of its body."""
    lines = [CALL, line(2, "model = build()")]
    for step in range(steps):
        lines += [line(3, "for step in range(steps):"), *body(step)]
    return lines


def write_trace(
    folder: Path,
    rank: int,
    lines: Iterable[str],
    *,
    world: int = 4,
    pid: int | None = None,
    parent: int | None = None,
    seconds: float = 10.0,
    later: float = 0.0,
    ended: bool = False,
    pieces: int = 1,
    drop: int = 0,
    compressed: bool = False,
    host: str = "node1",
    note: str = "",
) -> Path:
    """Write the files that a process leaves: its lines spread over `seconds`, begun `later` than the others."""
    pid = 1000 + rank if pid is None else pid
    started = STARTED + timedelta(seconds=later)
    words = f"# mldebug trace 1 host={host} rank={rank} world={world} pid={pid}"
    words += f" parent={parent}" if parent is not None else ""
    tail = f" started={started.isoformat(timespec='milliseconds')} python=3.12.1 {note} argv=[]\n"
    texts = list(lines)
    stamped = []
    for number, text in enumerate(texts):
        now = int(seconds * (number + 1) / len(texts))
        clock = f"{now // 3600}:{now // 60 % 60:02}:{now % 60:02} "
        stamped.append((text if text.startswith(" ") else clock + text) + "\n")
    size = -(-len(stamped) // pieces)
    path = folder / f"trace-{host}-{rank}-{pid}.txt"
    for piece in range(1, pieces + 1):
        head = words + (f" piece={piece}" if piece > 1 else "") + tail
        data = (head + "".join(stamped[(piece - 1) * size : piece * size])).encode()
        if piece == pieces:
            path.write_bytes(data + (b"# mldebug trace end\n" if ended else b""))
        elif piece > drop:
            old = path.with_suffix(f".{piece}.txt")
            if compressed:
                (folder / f"{old.name}.gz").write_bytes(gzip.compress(data))
            else:
                old.write_bytes(data)
    stopped = (started + timedelta(seconds=seconds + 0.25)).timestamp()
    os.utime(path, (stopped, stopped))
    return path
