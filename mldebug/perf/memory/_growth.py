"""Whether a series of sizes, one a step, grows step after step. Plain numbers in, plain numbers out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

LEAST_STEPS = 8
LEAST_BYTES = 4096  # a step: a list of numbers that are logged grows by less, and is no trouble


def grows(sizes: Sequence[float], strict: bool = False) -> float | None:
    """The growth per step where the sizes go up step after step, else None.

    Kendall's rank correlation with time must be at least 0.8 (0.9 below twelve sizes; `strict`: 0.98): of any two
    steps the later one holds more, nearly always. Sizes that wander with the batches are far from that. Stairs, that
    go up at times and never down, have three of them at least, and a correlation of 0.6. What
    flattens out is no growth: the second half must add at least a third of what the first half did, and the last
    quarter something.

        grows([100, 110, 120, 131, 140, 150, 160, 170])  # 10.0
    """
    count = len(sizes)
    if count < LEAST_STEPS:
        return None
    score = sum(
        (sizes[later] > sizes[earlier]) - (sizes[later] < sizes[earlier])
        for earlier in range(count)
        for later in range(earlier + 1, count)
    )
    tau = score / (count * (count - 1) / 2)
    stairs = [later > earlier for earlier, later in itertools.pairwise(sizes) if later != earlier]
    goes_up = len(stairs) >= 3 and sum(stairs) == len(stairs) and count >= 12 and tau >= 0.6
    if tau < (0.98 if strict else 0.8 if count >= 12 else 0.9) and (strict or not goes_up):
        return None
    middle = count // 2
    first, second = sizes[middle] - sizes[0], sizes[-1] - sizes[middle]
    if second < first / 3 or sizes[-1] <= sizes[-1 - max(1, count // 4)]:
        return None
    # Of stairs the median may be that of a flat part.
    return _median_slope(sizes) or (sizes[-1] - sizes[0]) / (count - 1)


def _median_slope(sizes: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs."""
    count = len(sizes)
    slopes = sorted(
        (sizes[later] - sizes[earlier]) / (later - earlier)
        for earlier in range(count)
        for later in range(earlier + 1, count)
    )
    half = len(slopes) // 2
    return slopes[half] if len(slopes) % 2 else (slopes[half - 1] + slopes[half]) / 2


def thinned(sizes: Sequence[float], most: int = 64) -> list[float]:
    """At most `most` of them, evenly taken, the last one always."""
    if len(sizes) <= most:
        return list(sizes)
    return [sizes[(index + 1) * len(sizes) // most - 1] for index in range(most)]
