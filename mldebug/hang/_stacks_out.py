"""Stacks of all ranks for other viewers: folded lines (flame graphs) and speedscope."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence, Frame


def folded(evidence: Evidence) -> str:
    """One line for each distinct stack, outermost frame first, with the number of times it was seen.

    Path("job.folded").write_text(folded(evidence))
    """
    counts = Counter(";".join([title, *map(_label, frames)]) for title, frames in _stacks(evidence))
    return "".join(f"{line} {count}\n" for line, count in sorted(counts.items()))


def speedscope(evidence: Evidence) -> str:
    """A document for speedscope.app: one profile for each thread of each rank.

    Path("job.speedscope.json").write_text(speedscope(evidence))
    """
    index: dict[tuple[str, str, int], int] = {}
    profiles: dict[str, list[list[int]]] = {}
    for title, frames in _stacks(evidence):
        row = [index.setdefault((frame["name"], frame["file"], frame["line"]), len(index)) for frame in frames]
        profiles.setdefault(title, []).append(row)
    document: dict[str, Any] = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "mldebug",
        "shared": {"frames": [{"name": name, "file": file, "line": line} for name, file, line in index]},
        "profiles": [
            {
                "type": "sampled",
                "name": title,
                "unit": "none",
                "startValue": 0,
                "endValue": len(rows),
                "samples": rows,
                "weights": [1] * len(rows),
            }
            for title, rows in profiles.items()
        ],
    }
    return json.dumps(document)


def _stacks(evidence: Evidence) -> Iterator[tuple[str, list[Frame]]]:
    for rank in evidence["ranks"]:
        name = f"rank {rank['rank']}" if rank["rank"] is not None else f"pid {rank['pid']}"
        owners = [(name, rank["samples"])]
        owners += [(f"{name} child {child['pid']}", child["samples"]) for child in rank["children"]]
        for title, samples in owners:
            for sample in samples:
                for thread in sample["threads"]:
                    yield f"{title} {thread['name']}", thread["frames"][::-1]


def _label(frame: Frame) -> str:
    return f"{frame['name']} ({frame['file']}:{frame['line']})".replace(";", ",").replace("\n", " ")
