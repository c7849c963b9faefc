"""What is to be thought of the figures: ranks that are slower than the others, and links slower than elsewhere."""

from __future__ import annotations

import statistics
from typing import Any

from mldebug.core.reference import expected_busbw

_Z = 5.0  # robust z, from which on a rank stands out
_LOW = 0.85  # of what others measured


def slow_ranks(
    ranks: list[dict[str, Any]], least_us: float = 30.0, *, shared_memory: bool = False
) -> list[dict[str, Any]]:
    """The ranks that need much longer than the others to launch a call, or whose memory is slower.

    A collective takes as long on all ranks: who is late shows only in what each does by itself. With two ranks there
    is no spread, and only a factor of three counts. Less than `least_us` more is no matter, and how fast memory is
    copied says nothing of a rank where all of them copy the same one (`shared_memory`).
    """
    found = []
    for name, what, bad, least in (
        ("launch_us", "needs {value:.0f} us to launch a call, and the others {usual:.0f} us", 1, least_us),
        ("copy_gbps", "copies its own memory at {value:.0f} GBps, and the others at {usual:.0f} GBps", -1, 0.0),
    ):
        values = [float(rank[name]) for rank in ranks if name in rank]
        if len(values) < len(ranks) or len(values) < 2 or (name == "copy_gbps" and shared_memory):
            continue
        for rank, value in zip(ranks, values, strict=True):
            others = [other for other_rank, other in zip(ranks, values, strict=True) if other_rank is not rank]
            usual = statistics.median(others)
            spread = statistics.median(abs(other - usual) for other in others)
            z = bad * (value - usual) / max(1.4826 * spread, 0.02 * usual, 1e-9)
            off = value / usual if bad > 0 else usual / max(value, 1e-9)
            far = off > (1.5 if bad > 0 else 1.18) if len(values) > 2 else off > 3
            if far and z > _Z and bad * (value - usual) > least:
                why = what.format(value=value, usual=usual)
                found.append({"rank": rank["rank"], "host": rank["host"], "what": name, "z": round(z, 1), "why": why})
    return found


def best_cell(rows: list[dict[str, Any]], collective: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(row, cell) with the highest busbw of a collective."""
    cells = [
        (row, row[place])
        for row in rows
        if row["collective"] == collective
        for place in ("out_of_place", "in_place")
        if place in row
    ]
    return max(cells, key=lambda pair: float(pair[1]["busbw"])) if cells else None


def expectations(evidence: dict[str, Any]) -> list[dict[str, Any]]:
    """The best figure of each collective beside what was measured elsewhere on as many of the same GPUs, if known."""
    found = []
    for collective in dict.fromkeys(row["collective"] for row in evidence["rows"]):
        best = best_cell(evidence["rows"], collective)
        assert best is not None
        row, cell = best
        known = expected_busbw(
            evidence["gpu"], gpus=evidence["world"], nodes=len(evidence["hosts"]), collective=collective,
            nbytes=row["bytes"],
        )  # fmt: skip
        if known is not None:
            share = cell["busbw"] / known.busbw
            found.append(
                {
                    "collective": collective, "bytes": row["bytes"], "busbw": cell["busbw"], "expected": known.busbw,
                    "share": share, "low": share < _LOW, "platform": known.platform, "notes": known.notes,
                    "source": known.source,
                }
            )  # fmt: skip
    return found
