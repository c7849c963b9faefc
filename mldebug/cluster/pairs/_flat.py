"""What each pair of a set should reach, judged by the set itself: GPUs of one node, or the nodes of a cluster.

The difficulty is that healthy sets are not uniform (NVLink between some GPUs only, NUMA, switches with few uplinks),
and that in small sets one bad member spoils most pairs: 4 of 6 among three. Structure is told from a fault by its
shape: a bad member is slow with all others, a bad path is alone, and links of another kind join all members alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mldebug.cluster.pairs._halves import halved
from mldebug.cluster.pairs._stats import median, upper

_GAP = 0.11  # of logarithms: nearer values are of one kind of link
_FALL = 0.08  # a member that is less below the others is not looked at
_FEW = 0.25  # of the pairs: fewer slow ones, without order, are faults and no structure


def expected(rate: Any, most_bad: float) -> Any:
    """The logarithm of the bandwidth that each pair should reach; NaN where nothing tells.

    `rate` is a square matrix of logarithms, NaN where unknown. At most the share `most_bad` of the members is bad.
    """
    size = len(rate)
    if size < 2 or not np.isfinite(rate).any():
        return rate.copy()
    lean = _lean(rate)
    mean = _both_ways(rate)
    if size == 2:
        top = np.nanmax(rate)
        return np.where(np.isfinite(rate) & (rate < top + np.log(0.6)), top, rate)
    drop = halved(mean)
    mean = mean + drop
    stars = _stars(mean, most_bad)
    none = np.zeros(size, dtype=bool)
    members = np.isfinite(mean).any(axis=1).sum()
    for bad, share in ((stars, most_bad), (none, most_bad), (none, most_bad / 2)):
        base = _by_kind(mean, bad, share)
        slow = upper(mean - base, 0.75) < -_FALL
        if slow.sum() <= most_bad * members:  # else what was taken for bad members is a kind
            break
    later = np.triu(np.ones((size, size)), 1) - np.tril(np.ones((size, size)), -1)
    return np.where(np.isfinite(mean), base - drop + later * lean / 2, np.nan)


def levels(values: Any, gap: float = _GAP) -> list[Any]:
    """The indices of `values` in clusters that gaps part, the highest first."""
    order = np.argsort(-values)
    cuts = np.flatnonzero(-np.diff(values[order]) > gap) + 1
    return [part for part in np.split(order, cuts) if len(part)]


def _both_ways(rate: Any) -> Any:
    """The mean of both directions, or the one that there is."""
    there, back = np.isfinite(rate), np.isfinite(rate.T)
    total = np.where(there, rate, 0) + np.where(back, rate.T, 0)
    mean = total / np.where(there | back, there.astype(int) + back, np.nan)
    np.fill_diagonal(mean, np.nan)
    return mean


def _lean(rate: Any) -> float:
    """How much faster pairs are towards the later member, where that holds for all alike; else 0."""
    gap = (rate - rate.T)[np.triu_indices(len(rate), 1)]
    gap = gap[np.isfinite(gap)]
    if 0 < len(gap) < 3:
        return float(np.median(gap)) if np.abs(gap).max() < 0.5 and len(set(np.sign(gap))) == 1 else 0.0
    if not len(gap):
        return 0.0
    middle = float(np.median(gap))
    alike = np.mean((gap / middle > 0.5) & (gap / middle < 1.6)) if abs(middle) > 0.01 else 0.0
    return middle if alike > (0.7 if len(rate) < 4 else 0.55) else 0.0


def _stars(mean: Any, most_bad: float) -> Any:
    """Members whose sorted bandwidths are all below those of the others, as far as such a member can tell: bool."""
    size = len(mean)
    known = np.isfinite(mean).sum(axis=1)
    none = np.zeros(size, dtype=bool)
    if np.median(known) < 0.8 * (size - 1) or size < 3:
        return none
    falls, shares = np.zeros(size), np.zeros(size)
    if size > 64:
        rows = _sorted(mean)
        usual = median(rows.T)
    for one in range(size):
        others = np.arange(size) != one
        if size <= 64:  # a bad member lowers one value of each other's row: leave it out
            usual = median(_sorted(mean[np.ix_(others, others)])[:, : size - 2].T)
        own = _sorted(mean[one, others][None])[0][: len(usual)]
        fall = own - usual[: len(own)]
        fall = fall[np.isfinite(fall)]
        if len(fall):
            falls[one] = np.median(fall)
            shares[one] = np.mean(fall < falls[one] / 2)
    spread = 1.5 * np.median(np.abs(falls - np.median(falls)))
    stars = (falls < -max(_FALL, min(3 * spread, 0.25))) & (shares >= 0.8)
    return stars if stars.sum() <= most_bad * size else none


def _sorted(rows: Any) -> Any:
    """Each row in falling order, NaN last."""
    return -np.sort(-rows, axis=1)


def _by_kind(mean: Any, stars: Any, most_bad: float) -> Any:
    """The level of the kind of link that each pair has."""
    size = len(mean)
    row, column = np.triu_indices(size, 1)
    values = mean[row, column]
    sound = np.isfinite(values) & ~stars[row] & ~stars[column]
    if not sound.any():
        sound = np.isfinite(values)
    index = np.flatnonzero(sound)
    base = np.full((size, size), np.nan)
    parts = _joined([index[part] for part in levels(values[index])], values)
    for part, level in _kinds(parts, row, column, size, most_bad):
        centre = np.median(values[level])
        base[row[part], column[part]] = base[column[part], row[part]] = centre
    _beside_stars(mean, base, stars)
    return base


def _kinds(parts: list[Any], row: Any, column: Any, size: int, most_bad: float) -> list[tuple[Any, Any]]:
    """(pairs of one kind, those that show its level). What is slow without being a kind belongs to the kind above."""
    known = np.bincount(np.r_[row[np.concatenate(parts)], column[np.concatenate(parts)]], minlength=size)
    kinds = [(parts[0], parts[0])]
    for place, part in enumerate(parts[1:], 1):
        below = np.concatenate(parts[place:])
        if _is_structure(part, below, kinds[-1][1], row, column, known, most_bad):
            kinds.append((part, part))
        else:
            whole, level = kinds[-1]
            kinds[-1] = (np.concatenate([whole, part]), level)
    return [(whole, level if 10 * len(level) >= len(whole) else whole) for whole, level in kinds]


def _joined(parts: list[Any], values: Any) -> list[Any]:
    """Stragglers at the upper end of a kind belong to it, not to the kind far above them."""
    found = parts[:1]
    carried = np.zeros(0, dtype=np.int64)
    for place, part in enumerate(parts[1:], 2):
        after = parts[place] if place < len(parts) else None
        part = np.concatenate([carried, part])
        carried = carried[:0]
        above = values[found[-1]].min() - values[part].max()
        if after is not None and 3 * len(part) <= len(after) and values[part].min() - values[after].max() < above / 3:
            carried = part
        else:
            found.append(part)
    return found


def _is_structure(part: Any, below: Any, above: Any, row: Any, column: Any, known: Any, most_bad: float) -> bool:
    """Whether slower pairs are another kind of link, and no fault of members or paths.

    `part` are the pairs in question, `below` the same with all slower ones, `above` the pairs of the kind above.
    """
    size = len(known)
    slow = np.bincount(np.r_[row[below], column[below]], minlength=size)
    fast = np.bincount(np.r_[row[above], column[above]], minlength=size)
    hubs = slow >= np.maximum(2, 0.85 * (slow + fast))
    dense = known.mean() >= 0.6 * size
    if (
        0 < hubs.sum() <= (most_bad if dense else most_bad / 2) * (known > 0).sum()
        and np.mean(hubs[row[part]] | hubs[column[part]]) > 0.85
    ):
        return False
    own = np.bincount(np.r_[row[part], column[part]], minlength=size)
    if own[known > 0].min() > 0:
        return True
    if not dense and len(part) >= 2:
        return True  # of few pairs that were measured, two at one level are no chance
    return len(below) >= _FEW * known.sum() / 2 and (len(part) > 1 or known.sum() <= 4)


def _beside_stars(mean: Any, base: Any, stars: Any) -> None:
    """Pairs of a bad member should reach what a sound one has, in the order of their bandwidths."""
    if not stars.any():
        return
    sound = ~stars
    usual = median(_sorted(base[np.ix_(sound, sound)]).T)
    usual = usual[np.isfinite(usual)]
    if not len(usual):
        usual = np.array([np.nanmax(mean)])
    for one in np.flatnonzero(stars):
        order = np.argsort(-np.where(np.isfinite(mean[one]), mean[one], -np.inf))
        for place, other in enumerate(order):
            if np.isfinite(mean[one, other]):
                base[one, other] = base[other, one] = usual[min(place, len(usual) - 1)]
