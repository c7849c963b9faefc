"""What a pair matrix is made of: plain JSON, the same from a live run, a simulated one and a file.

The pairs are columns, so that a million of them fit in memory: the pair number p went from GPU `gpus[src[p]]` to GPU
`gpus[dst[p]]` with `gbps[p]` GBps (10^9 bytes/s) and ended as `status[p]` says. A pair may be there many times, once
for each round it was measured in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from mldebug.core.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import NotRequired

SCHEMA = 1

# What a pair can end as. `hang`: the deadline passed; `wrong`: the bytes that came are not those that were sent;
# `dead`: a worker went away; `missing`: it should have been measured and was not; `skipped`: nobody wanted it.
STATUSES = ("ok", "hang", "error", "wrong", "dead", "missing", "skipped")
MOST_GPUS = 4096  # of one matrix; its memory grows with their square
FAILED = ("hang", "error", "wrong", "dead")


class PairsEvidence(TypedDict):
    schema: int
    gpus: list[str]  # "host:gpu"; hosts alone where nodes were measured against nodes
    src: list[int]
    dst: list[int]
    gbps: list[float | None]
    status: list[str]
    notes: list[str]
    latency_us: NotRequired[list[float | None]]
    round: NotRequired[list[int | None]]
    both_gbps: NotRequired[list[float | None]]  # while the other direction was busy too
    connect_us: NotRequired[list[float | None]]  # in a matrix over TCP, whose ends are hosts
    lost: NotRequired[list[float | None]]  # share of the TCP segments that were sent again
    why: NotRequired[list[str]]  # how a pair failed, in words
    backend: NotRequired[str]  # gloo, where CPUs carried the messages
    device: NotRequired[str]  # what most GPUs call themselves, where messages were large
    blame: NotRequired[list[dict[str, Any]]]  # what a live run knows to be one end's fault: gpu, what, why, with, round


def is_ping(evidence: PairsEvidence) -> bool:
    """Whether it was measured over TCP between hosts."""
    return "connect_us" in evidence


def check_evidence(evidence: PairsEvidence) -> None:
    """Raise a UsageError unless the columns are equally long and point at GPUs that are there."""
    try:
        size, many = len(evidence["src"]), len(evidence["gpus"])
        ends = [*evidence["src"], *evidence["dst"]]
        whole = size == len(evidence["dst"]) == len(evidence["gbps"]) == len(evidence["status"])
        inside = not ends or (min(ends) >= 0 and max(ends) < many)
        few = many <= MOST_GPUS
        known = set(evidence["status"]) <= set(STATUSES)
        names = len(set(evidence["gpus"])) == many
    except (KeyError, TypeError) as exc:
        raise UsageError(f"this is no pair matrix: {exc}", _HINT) from exc
    for fine, what in (
        (whole, "its columns are not equally long"),
        (inside, "src or dst points past the last GPU"),
        (known, f"status has other words than {', '.join(STATUSES)}"),
        (names, "a GPU is listed twice"),
        (few, f"it has {many:,} GPUs, and {MOST_GPUS:,} is the most"),
    ):
        if not fine:
            raise UsageError(f"this is no pair matrix: {what}", _HINT)


_HINT = "load_pairs(FILE) reads CSV with the header src,dst,gbps,status and JSON"
