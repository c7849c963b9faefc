"""A main thread that reads a result from its GPU: it seems to run, and waits for a collective on the GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldebug.hang._evidence import Communicator, Evidence, Rank, Source
    from mldebug.hang._frames import Wait

ON_GPU = "a collective on the GPU"
_BUSY = 90  # percent: a kernel that waits for other ranks keeps its GPU at work

# What makes the CPU wait for the GPU, in the text of a line.
_READS = re.compile(
    r"\.(item|tolist|cpu|numpy|to|wait|nonzero|any|all|unique|float|isnan|isfinite)\(|synchronize\(|print\(|"
    r"\b(float|int|bool|str|format|isnan|isfinite|max|min|list|sum)\(|^\s*(if|elif|while|assert)\b|\bf[\"']|\[|log"
)


def on_gpu(waits: tuple[Wait, ...], rank: Rank, evidence: Evidence) -> tuple[Wait, ...]:
    """The waits of a main thread that reads a result from its GPU, where its collectives are not through.

    Seen from outside such a thread runs: it asks the GPU again and again. It waits if it stands at one place in all
    looks, its GPU was at work in each, and it issued nothing to NCCL in between.
    """
    cards, groups = rank.get("gpus", []), rank.get("nccl", [])
    if len(waits) < 2 or not cards or not groups or any(wait.kind not in ("busy", "idle") for wait in waits):
        return waits
    if any((wait.path, wait.ints) != (waits[0].path, waits[0].ints) for wait in waits):
        return waits
    if not all(percent >= _BUSY for card in cards for percent in card["busy"][1:]) or not all(map(_still, groups)):
        return waits
    site = waits[0].site
    source = evidence.get("source", {}).get(f"{site['file']}:{site['line']}") if site else None
    if not _reads(rank, source):
        return waits
    return tuple(replace(wait, kind="collective", op=ON_GPU) for wait in waits)


def _still(group: Communicator) -> bool:
    issued = group.get("issued", [])
    return all(one == issued[0] for one in issued)


def _reads(rank: Rank, source: Source | None) -> bool:
    """Whether the innermost line reads from the GPU: by its text, or as a function of torch that does nothing else."""
    for sample in rank["samples"][-1:]:
        for thread in sample["threads"]:
            if thread["name"] == "MainThread" and thread["frames"] and "/torch/" in thread["frames"][0]["file"]:
                return True
    return source is not None and _READS.search(source["text"]) is not None
