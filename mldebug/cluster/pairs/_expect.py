"""What every pair should reach by its siblings, and how far apart siblings are when nothing is wrong.

Pairs within a node have the pairs of the same places in other nodes as siblings; one node alone is judged by itself.
Pairs between nodes are the sum of three: their rails, their nodes, and what is left. No bandwidth is known beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mldebug.cluster.pairs._flat import expected, levels
from mldebug.cluster.pairs._grid import Grid
from mldebug.cluster.pairs._stats import median, upper

_ISOLATED = np.log(0.3)  # rails that reach less of each other than this share of themselves have no good route
_LEAST = 0.01  # noise is never taken for less


@dataclass(frozen=True)
class Expected:
    """`base[i, j]` is the logarithm of what the pair should reach, `noise[i, j]` the spread around it."""

    base: Any
    noise: Any


def expect(grid: Grid) -> Expected:
    """Judge the pairs of `grid` that ended well against each other."""
    nodes = len(grid.hosts)
    kinds = np.zeros(nodes, dtype=np.int64)
    base = np.full_like(grid.rate, np.nan)
    inside = grid.node[:, None] == grid.node[None, :]
    if inside.sum() > grid.size:
        kinds = _within(grid, base)
    if nodes > 1:
        _between(grid, kinds, base, inside)
    off = grid.rate - base
    noise = np.full_like(base, np.nan)
    total = int(np.isfinite(off).sum())
    alike = np.bincount(kinds)[kinds][grid.node]  # nodes that the level of a place rests on
    doubt = np.where(alike > 1, np.sqrt(1 + 2.5 / alike), 1.0)[:, None]
    between = np.sqrt(1 + 2.5 / max(nodes * (nodes - 1), 1)) * _spread(np.where(inside, np.nan, off), total)
    noise[:] = np.where(inside, _spread(np.where(inside, off, np.nan), total) * doubt, between)
    return Expected(base, noise)


def _within(grid: Grid, base: Any) -> Any:
    """Fill `base` for pairs within nodes; the kind of GPU of each node."""
    nodes, rails = len(grid.hosts), len(grid.rails)
    cube = np.full((nodes, rails, rails), np.nan)
    for node in range(nodes):
        own = grid.members(node)
        cube[node][np.ix_(grid.rail[own], grid.rail[own])] = grid.rate[np.ix_(own, own)]
    kinds = _kinds_of_nodes(cube)
    for kind in range(int(kinds.max()) + 1):
        alike = np.flatnonzero(kinds == kind)
        model = _template(cube[alike])
        for node in map(int, alike):
            own = grid.members(node)
            at = grid.rail[own]
            wanted = model[np.ix_(at, at)]
            alone = expected(grid.rate[np.ix_(own, own)], 1 / 3)
            base[np.ix_(own, own)] = np.where(np.isfinite(wanted), wanted, alone)
    return kinds


def _kinds_of_nodes(cube: Any) -> Any:
    """Which nodes have the same GPUs: sets of nodes that differ evenly from the others. One node alone is no kind."""
    nodes = len(cube)
    kinds = np.zeros(nodes, dtype=np.int64)
    if nodes < 4:
        return kinds
    with np.errstate(invalid="ignore"):
        level = upper((cube - upper(np.moveaxis(cube, 0, -1), 0.75)).reshape(nodes, -1), 0.5)
    index = np.flatnonzero(np.isfinite(level))
    found = 0
    heights: list[float] = []
    apart = []
    for part in levels(level[index]):
        if found == 0 or (len(part) >= 2 and len(part) >= 0.35 * nodes):
            kinds[index[part]] = found
            heights.append(float(np.median(level[index[part]])))
            found += 1
        else:
            apart.append(index[part])
            kinds[index[part]] = found - 1
    for part in apart:  # a node with few GPUs tells its level badly
        far = np.abs(np.array(heights) - np.median(level[part]))
        if far.min() < 0.2:
            kinds[part] = int(far.argmin())
    top = kinds == 0
    if found > 1 and top.sum() < max(2, 0.35 * nodes):  # one node that is faster makes no kind of the others
        kinds[top] = 1
        kinds -= 1
    return kinds


def _template(cube: Any) -> Any:
    """The logarithm of what each place of a node reaches on several nodes; NaN where one node alone has it."""
    many = np.isfinite(cube).sum(axis=0)
    side_by_side = np.moveaxis(cube, 0, -1)
    model = median(side_by_side)
    top = np.nanmax(np.where(np.isfinite(cube), cube, -np.inf), axis=0)
    if len(cube) == 2 and (many == 2).any():  # the higher of two is above their mean by 0.56 standard deviations
        gap = (cube[0] - cube[1])[many == 2]
        spread = float(np.quantile(np.abs(gap - np.median(gap)), 0.25)) / 0.3186 / 1.414
        top = top - 0.56 * min(0.08, spread)
    model = np.where(many >= 3, model, np.where(many == 2, top, np.nan))
    if len(cube) > 6:
        return model
    even = expected(model, 1 / 3)  # few nodes tell each place badly: places of one kind of link share their level
    return np.where(np.abs(even - model) < 0.15, even, model)


def _between(grid: Grid, kinds: Any, base: Any, inside: Any) -> None:
    """Fill `base` for pairs of different nodes."""
    rate = np.where(inside, np.nan, grid.rate)
    if not np.isfinite(rate).any():
        return
    nodes, rails = len(grid.hosts), len(grid.rails)
    by_node, slot = _blocks(grid, rate)  # [node, rail, node, rail]
    of_rails = _of_classes(grid, rate)
    share = 0.5 if nodes == 2 or rails > 3 else 0.65  # one bad GPU of two spoils half of its node's pairs
    pairs = by_node.transpose(0, 2, 1, 3)
    for _ in range(4 if rails > 1 else 0):
        of_nodes = upper((pairs - of_rails).reshape(nodes, nodes, -1), share)
        left = (pairs - of_nodes[:, :, None, None]).transpose(2, 3, 0, 1).reshape(rails, rails, -1)
        of_rails = _of_rails(left, nodes)
    of_nodes = upper((pairs - of_rails).reshape(nodes, nodes, -1), share)
    wanted = _of_nodes(of_nodes, kinds, 0.5 if inside.sum() > grid.size else 0.45)
    sound = np.isfinite(of_nodes) & (of_nodes >= wanted - 0.06)
    clean = _sound_rails(of_rails) if _tells_rails(by_node) else of_rails
    left = (pairs - clean - wanted[:, :, None, None])[sound][:, np.abs(clean - of_rails) < 0.15]
    shift = float(np.nanmedian(left)) if np.isfinite(left).any() else 0.0
    whole = wanted[:, None, :, None] + clean[None, :, None, :] + shift
    base[~inside] = whole.reshape(nodes * rails, nodes * rails)[np.ix_(slot, slot)][~inside]


def _tells_rails(by_node: Any) -> bool:
    """Whether rails can be compared between the same nodes; not in a sample that has one rail for each two nodes."""
    known = np.isfinite(by_node).transpose(0, 2, 1, 3)
    same = np.eye(known.shape[-1], dtype=bool)
    both = (known & same).any(axis=(2, 3)) & (known & ~same).any(axis=(2, 3))
    return bool(both.sum() * 4 >= known.any(axis=(2, 3)).sum())


def _of_classes(grid: Grid, rate: Any) -> Any:
    """How much pairs of different rails differ from those of the same rail, whatever their nodes."""
    same = np.eye(len(grid.rails), dtype=bool)
    on = grid.rail[:, None] == grid.rail[None, :]
    level = [rate[mask & np.isfinite(rate)] for mask in (on, ~on)]
    if not len(level[0]) or not len(level[1]):
        return np.zeros(same.shape)
    return np.where(same, 0.0, float(np.median(level[1]) - np.median(level[0])))


def _blocks(grid: Grid, rate: Any) -> tuple[Any, Any]:
    """`rate` with a place for each rail of each node, and the place of each GPU."""
    nodes, rails = len(grid.hosts), len(grid.rails)
    slot = grid.node * rails + grid.rail
    whole = np.full((nodes * rails, nodes * rails), np.nan)
    whole[np.ix_(slot, slot)] = rate
    return whole.reshape(nodes, rails, nodes, rails), slot


def _of_rails(left: Any, nodes: int) -> Any:
    """How much pairs of rails differ, whatever their nodes; places with few pairs take the mean of their class."""
    rails = len(left)
    count = np.isfinite(left).sum(axis=2)
    own = upper(left, {2: 1.0, 3: 0.8, 4: 0.6}.get(nodes, 0.5))
    same = np.eye(rails, dtype=bool)
    found = np.zeros((rails, rails))
    for members in (same, ~same):
        values = left[members]
        values = values[np.isfinite(values)]
        usual = np.median(values) if len(values) else 0.0
        enough = count[members] >= (4 if nodes > 4 else 2)
        if nodes <= 3:
            enough |= np.abs(own[members] - usual) < 0.3  # one value cannot be told from a fault
        found[members] = np.where(enough, own[members], usual)
    return found


def _sound_rails(of_rails: Any) -> Any:
    """The same without what a few rails lack, and without a fall between rails that no fabric has by design."""
    rails = len(of_rails)
    if rails < 2:
        return of_rails
    same = _sound_levels(np.diagonal(of_rails))
    cross = of_rails.copy()
    np.fill_diagonal(cross, np.nan)
    clean = expected(cross, 1 / 4)
    middle = np.nanmedian(clean)
    if middle < np.median(same) + _ISOLATED:
        clean = np.full_like(clean, np.median(same))
    clean[np.arange(rails), np.arange(rails)] = same
    return clean


def _sound_levels(same: Any) -> Any:
    """The levels of rails; few that are low are taken for bad."""
    clean = same.copy()
    above: Any = None
    for part in levels(same):
        level = np.median(same[part])
        below = same < level - 0.05
        if above is not None and 4 * (below.sum() + len(part)) <= np.isfinite(same).sum():
            level = above
        clean[part] = above = level
    return clean


def _of_nodes(rate: Any, kinds: Any, most_bad: float) -> Any:
    """The level of each pair of nodes, where only nodes of one kind are siblings.

    Half of the nodes may be bad where their GPUs are known to be alike; else they are of another kind.
    """
    if kinds.max() == 0:
        return expected(rate, most_bad)
    wanted = np.full_like(rate, np.nan)
    for one in range(kinds.max() + 1):
        for other in range(one, kinds.max() + 1):
            block = (kinds == one)[:, None] & (kinds == other)[None, :]
            block |= block.T
            own = np.flatnonzero((kinds == one) | (kinds == other))
            at = np.ix_(own, own)
            found = expected(np.where(block, rate, np.nan)[at], 0.5 if one == other else 1 / 3)
            wanted[at] = np.where(block[at], found, wanted[at])
    return wanted


def _spread(off: Any, total: int) -> float:
    """The robust standard deviation around what is expected, from the upper half, as faults are in the lower."""
    values = off[np.isfinite(off)]
    above = values[values > 0]
    found = 1.4826 * float(np.median(above)) if len(above) >= 3 else 0.0
    gap = (off - off.T)[np.triu_indices(len(off), 1)]
    gap = gap[np.isfinite(gap)]
    if len(gap) >= 3:  # both directions of a pair differ by noise alone, in the half where they differ least
        least = np.sort(np.abs(gap))[: len(gap) // 2]
        found = max(found, 1.3 * float(np.sqrt(np.mean(least**2))) / 1.414)
    few = 0.05 if total <= 6 else 0.035 if total <= 12 else 0.03 if len(values) <= 12 else 0.015
    return max(found, few, _LEAST)
