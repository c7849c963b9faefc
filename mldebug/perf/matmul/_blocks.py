"""What a search asks of a device, and what it is told: blocks of one shape, back to back. Plain Python, no torch."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# m, n, k of C (m, n) = A (m, k) @ B (k, n), and for a batch of products how many there are.
Shape = tuple[int, ...]


def flops_of(shape: Shape) -> int:
    """A multiplication and an addition count as two.

    flops_of((8192, 8192, 8192))  # 1.0995e12
    """
    return 2 * math.prod(shape)


def shape_text(shape: Sequence[int]) -> str:
    """`8192x4096x1024`, m n k; a batch comes last."""
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Ask:
    """Run this shape for `lead` seconds that do not count, and then for `seconds` that do."""

    shape: Shape
    lead: float
    seconds: float


@dataclass(frozen=True)
class Block:
    """What came of an Ask: the mean rate over `iterations` calls, and when it was on the machine's own clock.

    `error` says why there is no rate (then 0.0).
    """

    shape: Shape
    tflops: float
    at: float
    seconds: float
    iterations: int
    error: str = ""


class Machine(Protocol):
    """A device, or a simulated one."""

    def now(self) -> float:
        """Seconds, on the clock that deadlines are told in."""

    def run(self, asks: Sequence[Ask]) -> list[Block]:
        """Run them in this order with no gap in between, and say what came of each."""

    def fits(self, shape: Shape) -> bool:
        """Whether its matrices fit into the memory that was set aside."""


def ratios(blocks: Sequence[Block], reference: Shape) -> list[tuple[Block, float]]:
    """Each block of another shape with its rate as a share of what the reference did at that moment.

    That is read from the blocks of the reference before and after it, on a straight line between them, so that a clock
    that drifts with power and temperature takes no part. A block with no reference on either side is left out.

        [(block, 1.03)] = ratios([ref_before, block, ref_after], ref_before.shape)
    """
    known = sorted((one.at, one.tflops) for one in blocks if one.shape == reference and not one.error)
    if not known:
        return []
    times = [at for at, _ in known]
    found = []
    for one in blocks:
        if one.shape == reference or one.error:
            continue
        place = bisect.bisect(times, one.at)
        before, after = known[max(0, place - 1)], known[min(place, len(known) - 1)]
        share = (one.at - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        found.append((one, one.tflops / (before[1] + share * (after[1] - before[1]))))
    return found


def spread(values: Sequence[float]) -> float:
    """The standard deviation as a share of the mean; 0.0 for fewer than two values."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else 0.0
