"""Members of a set that fall into two halves, as the nodes of two switches do, where noise hides the gap between them.

Where the levels of two kinds of link lie apart, `_flat` sees them in the values alone. Many small clusters of noisy
values run into each other; that the slower pairs are just those between two halves still shows in who they join.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_LEAST = 6  # members
_MOST = 1024  # more take long, and their levels are told well by their number
_SMALLEST = 0.2  # of the members
_CLEAR = 0.75  # of the pairs are on their side of the middle between both levels
_GAP = 0.1  # of logarithms


def halved(mean: Any) -> Any:
    """How much lower the pairs between two halves are than those within, for each pair; zeros where there are none.

    `mean` is symmetric, of logarithms, NaN where unknown and on the diagonal.
    """
    drop = np.zeros_like(mean)
    if not _LEAST <= len(mean) <= _MOST or np.isfinite(mean).mean() < 0.6:
        return drop
    for _ in range(3):  # more than two switches are halves of halves
        side = _sides(mean + drop)
        if side is None:
            break
        gap = _gap(mean + drop, side)
        if gap <= 0:
            break
        drop += gap * (side[:, None] != side[None, :])
    return drop


def _sides(mean: Any) -> Any | None:
    """Which members belong together, by the strongest pattern of who is fast with whom: bool; None without one."""
    known = np.isfinite(mean)
    filled = np.where(known, mean, np.nanmedian(mean))
    low, high = np.quantile(filled[known], [0.02, 0.98])
    filled = np.clip(filled, low, high)  # a few bad pairs make no pattern
    filled -= filled.mean(axis=0)
    filled -= filled.mean(axis=1)[:, None]
    side = np.linalg.eigh(filled)[1][:, -1] > 0
    for _ in range(10):
        if min(side.sum(), (~side).sum()) < max(2, _SMALLEST * len(side)):
            return None
        with np.errstate(invalid="ignore"):
            ours, theirs = (
                np.where(known[:, part], mean[:, part], 0).sum(axis=1) / np.maximum(known[:, part].sum(axis=1), 1)
                for part in (side, ~side)
            )
        moved = ours > theirs
        if (moved == side).all():
            return side
        side = moved
    return None


def _gap(mean: Any, side: Any) -> float:
    """How much lower pairs between the sides are than those of either; 0 where that is not plain."""
    upper = np.triu(np.isfinite(mean), 1)
    across = side[:, None] != side[None, :]
    between = mean[upper & across]
    own = [mean[upper & part[:, None] & part[None, :]] for part in (side, ~side)]
    if len(between) < 4 or min(map(len, own)) < 1:
        return 0.0
    level = float(np.median(between))
    lower = min(float(np.median(part)) for part in own)
    gap = lower - level
    middle = level + gap / 2
    within = np.concatenate(own)
    if gap < _GAP or np.mean(between < middle) < _CLEAR or np.mean(within > middle) < _CLEAR:
        return 0.0
    spread = 1.4826 * float(np.median(np.abs(between - level)))
    sure = gap / max(spread, 0.01) / np.sqrt(1 / len(between) + 1 / len(within))
    return gap if sure > 2.5 * np.sqrt(len(mean)) else 0.0
