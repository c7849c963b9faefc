"""Which few things explain the bad pairs: GPUs, nodes, rails, paths.

`explain()` takes, again and again, the set of pairs whose common fall explains most: with `z` the distance of each
pair from its siblings in standard deviations, a set S explains (sum of z over S)^2 / |S|. A node that is bad explains
more than each of its GPUs, and one GPU that is bad more than its node, where most pairs are good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mldebug.cluster.pairs._grid import Grid

WORST = 12.0  # a failed pair counts as so many standard deviations, and no slow one counts as more
_TAIL = 15.0  # pairs that are higher still are of a faster kind
_HEAVY = 4.0  # what is higher than this is no noise of the usual kind
_ALONE = (0.6, 0.85)  # of what makes a cause sure: so much is left without its worst pair; where noise has tails
_THIRD, _FIFTH = -1.1, -1.5
_FALL = 0.12  # a lesser fall is no fault, however sure it is
_MOST = 200  # causes; a cluster with more has one trouble that this search does not know


@dataclass(frozen=True)
class Cause:
    """`kind` is gpu, node, node-path, path, rail or cross; `who` the indices of GPUs, nodes or rails."""

    kind: str
    who: tuple[int, ...]
    both: bool  # a path that is bad in both directions; sending and receiving of a GPU
    scope: str  # all, inter or intra
    way: str  # both, tx or rx
    cells: Any  # flat indices of its pairs
    fall: float  # the mean logarithm of what is left
    z: float
    why: str = ""  # where a live run saw the reason


Candidate = tuple[float, str, tuple[int, ...], str, str]  # gain, kind, who, scope, way


def explain(grid: Grid, off: Any, z: Any) -> list[Cause]:
    """The causes of what is bad, strongest first. `off` is the logarithm of measured to expected, `z` the same in
    standard deviations, both NaN where nothing was measured."""
    space = _Space(grid, z, off)
    found: list[Cause] = []
    while len(found) < _MOST and (causes := space.best()):
        for cause in causes:
            found.append(cause)
            space.take(cause)
    return found


class _Space:
    """The pairs that nothing explains yet, and the sets that could."""

    def __init__(self, grid: Grid, z: Any, off: Any) -> None:
        self.grid, self.raw, self.off = grid, z, off
        self.z = np.where(np.isfinite(z), np.clip(z, -WORST, 3.0), np.nan)
        root = np.sqrt(max(np.isfinite(z).sum(), 1))
        self.sure = (5.0 + 5 / root, 6.0 + 8 / root)  # few pairs tell the noise badly; a path is one among many
        size = grid.size
        self.inside = grid.node[:, None] == grid.node[None, :]
        # As far above their siblings as some pairs are, others may be below: noise has such tails, and faults have not.
        self.tail = [
            (_highest(z[mask], _TAIL), _highest(np.expm1(off[mask]), 0.45)) for mask in (self.inside, ~self.inside)
        ]
        self.heavy = max(_highest(z[mask], _TAIL) for mask in (self.inside, ~self.inside)) > _HEAVY
        self.same_rail = grid.rail[:, None] == grid.rail[None, :]
        self.starts = np.flatnonzero(np.r_[True, grid.node[1:] != grid.node[:-1]])
        self.of_rail = np.zeros((size, len(grid.rails)), dtype=np.float32)
        self.of_rail[np.arange(size), grid.rail] = 1
        self.gpus_of = np.bincount(grid.node, minlength=len(grid.hosts))

    def _by_nodes(self, value: Any) -> Any:
        """Sums over the pairs of each two nodes."""
        return np.add.reduceat(np.add.reduceat(value, self.starts, axis=0), self.starts, axis=1)

    def take(self, cause: Cause) -> None:
        """What it explains is out of the question from now on."""
        self.z.reshape(-1)[cause.cells] = np.nan

    def best(self) -> list[Cause]:
        """What explains most; of paths all that come before anything else, as they have no pair in common."""
        known = np.isfinite(self.z)
        if not known.any():
            return []
        value = np.where(known, self.z, 0).astype(np.float32)
        found: list[Cause] = []
        taken: set[int] = set()
        for candidate in sorted(self._candidates(value, known), reverse=True)[:300]:
            if found and candidate[1] != "path":
                break
            cause = self._check(candidate)
            if cause is None or not taken.isdisjoint(cause.cells.tolist()):
                continue
            found.append(cause)
            if cause.kind != "path":
                break
            taken.update(cause.cells.tolist())
        return found

    def _candidates(self, value: Any, known: Any) -> Iterator[Candidate]:
        count = known.astype(np.float32)
        yield from self._gpus(value, count)
        yield from self._paths(value, known)
        yield from self._nodes(value, count)
        if len(self.grid.hosts) > 1 and len(self.grid.rails) > 1:
            yield from self._rails(value, count)

    def _gpus(self, value: Any, count: Any) -> Iterator[Candidate]:
        scopes = {"all": 1.0, "inter": ~self.inside, "intra": self.inside}
        if len(self.grid.hosts) == 1:
            scopes = {"all": 1.0}
        for scope, mask in scopes.items():
            part, many = value * mask, count * mask
            sent, received = part.sum(axis=1), part.sum(axis=0)
            partners = ((many + many.T) > 0).sum(axis=1)
            for way, total, pairs in (
                ("both", sent + received, many.sum(axis=1) + many.sum(axis=0)),
                ("tx", sent, many.sum(axis=1)),
                ("rx", received, many.sum(axis=0)),
            ):
                gain = _gain(total, pairs)
                gain[(partners < 2) | (self.gpus_of[self.grid.node] < 2)] = 0
                for one in _top(gain):
                    yield float(gain[one]), "gpu", (int(one),), scope, way

    def _paths(self, value: Any, known: Any) -> Iterator[Candidate]:
        one_way = np.where(value < 0, value * value, 0)
        pair = value + value.T
        count = known.astype(np.int8) + known.T
        both = np.triu(np.where((pair < 0) & (count == 2), pair * pair / 2, 0), 1)
        for gain, way in ((one_way, "tx"), (both, "both")):
            for flat in _top(gain.reshape(-1), 32):
                at = divmod(int(flat), len(value))
                yield float(gain[at]), "path", at, "all", way

    def _nodes(self, value: Any, count: Any) -> Iterator[Candidate]:
        total = self._by_nodes(value)
        pairs = self._by_nodes(count)
        own, own_pairs = np.diagonal(total).copy(), np.diagonal(pairs).copy()
        sent, received = total.sum(axis=1) - own, total.sum(axis=0) - own
        sent_pairs, received_pairs = pairs.sum(axis=1) - own_pairs, pairs.sum(axis=0) - own_pairs
        linked = (pairs + pairs.T) > 0
        np.fill_diagonal(linked, False)
        partners = linked.sum(axis=1)
        # A node alone has no siblings: it is bad where most of its pairs fail.
        some = len(self.grid.hosts) > 1 or 2 * int((self.grid.failed > 0).sum()) > int(self.grid.measured.sum())
        for scope, way, amount, many, allowed in (
            (
                "all",
                "both",
                sent + received + own,
                sent_pairs + received_pairs + own_pairs,
                (partners > 0) & (own_pairs > 0),
            ),
            ("inter", "both", sent + received, sent_pairs + received_pairs, partners > 1),
            ("inter", "tx", sent, sent_pairs, partners > 1),
            ("inter", "rx", received, received_pairs, partners > 1),
            ("intra", "both", own, own_pairs, (self.gpus_of > 2) & some),
        ):
            gain = np.where(allowed, _gain(amount, many), 0)
            for one in _top(gain):
                yield float(gain[one]), "node", (int(one),), scope, way
        np.fill_diagonal(total, 0)
        np.fill_diagonal(pairs, 0)
        both = np.triu(_gain(total + total.T, pairs + pairs.T), 1)
        several = (pairs + pairs.T) > 2
        for gain, way in ((both * several, "both"), (_gain(total, pairs) * (pairs > 1), "tx")):
            for flat in _top(gain.reshape(-1), 8):
                at = divmod(int(flat), len(total))
                yield float(gain[at]), "node-path", at, "inter", way

    def _rails(self, value: Any, count: Any) -> Iterator[Candidate]:
        between = ~self.inside
        part, many = value * between, count * between
        total = self.of_rail.T @ part @ self.of_rail
        pairs = self.of_rail.T @ many @ self.of_rail
        same, same_pairs = np.diagonal(total), np.diagonal(pairs)
        cross = total.sum(axis=1) + total.sum(axis=0) - 2 * same
        cross_pairs = pairs.sum(axis=1) + pairs.sum(axis=0) - 2 * same_pairs
        for scope, amount, number in (
            ("all", cross + same, cross_pairs + same_pairs),
            ("cross", cross, cross_pairs),
            ("same", same, same_pairs),
        ):
            gain = _gain(amount, number) * (scope != "same" or len(self.grid.hosts) > 2)
            for one in _top(gain):
                yield float(gain[one]), "rail", (int(one),), scope, "both"
        blocks = self.isolated(value, count)
        if blocks.any():
            mask = self._between_rails(blocks)
            amount, number = float(part[mask].sum()), float(many[mask].sum())
            yield 1.3 * amount * amount / max(number, 1), "cross", (), "inter", "both"

    def isolated(self, value: Any, count: Any) -> Any:
        """The pairs of nodes whose rails reach themselves and not each other: bool."""
        off_rail = ~self.inside & ~self.same_rail
        on_rail = ~self.inside & self.same_rail
        bad = (value < -WORST / 4).astype(np.float32)
        counts = [self._by_nodes(count * mask) for mask in (off_rail, on_rail)]
        bads = [self._by_nodes(bad * mask) for mask in (off_rail, on_rail)]
        counts, bads = [total + total.T for total in counts], [total + total.T for total in bads]
        if not ((counts[0] > 0) & (counts[1] > 0)).any():  # a sample: no two nodes were measured on both
            off, on = (float(bad.sum()) / max(float(many.sum()), 1) for bad, many in zip(bads, counts, strict=True))
            return (counts[0] > 0) & bool(off >= 0.8 and counts[1].any() and on <= 0.2)
        return (counts[0] > 1) & (bads[0] >= 0.8 * counts[0]) & (counts[1] > 0) & (bads[1] <= 0.3 * counts[1])

    def _between_rails(self, blocks: Any) -> Any:
        node = self.grid.node
        return blocks[np.ix_(node, node)] & ~self.same_rail & ~self.inside

    def _mask(self, kind: str, who: tuple[int, ...], scope: str, way: str) -> Any:
        """The pairs of a candidate: bool."""
        size = self.grid.size
        if kind == "path":
            mask = np.zeros((size, size), dtype=bool)
            mask[who] = True
            return mask | mask.T if way == "both" else mask
        if kind == "cross":
            known = np.isfinite(self.z)
            value = np.where(known, self.z, 0).astype(np.float32)
            return self._between_rails(self.isolated(value, known.astype(np.float32)))
        group = self.grid.rail if kind == "rail" else self.grid.node
        one = np.arange(size) == who[0] if kind == "gpu" else group == who[0]
        if kind == "node-path":
            mask = one[:, None] & (group == who[1])[None, :]
            return mask | mask.T if way == "both" else mask
        sends, receives = one[:, None] & np.ones(size, dtype=bool), np.ones((size, 1), dtype=bool) & one[None, :]
        mask = {"both": sends | receives, "tx": sends, "rx": receives}[way]
        if kind == "rail":
            mask = mask & ~self.inside
            return mask & (self.same_rail if scope == "same" else ~self.same_rail if scope == "cross" else True)
        return mask & (~self.inside if scope == "inter" else self.inside if scope == "intra" else True)

    def _check(self, candidate: Candidate) -> Cause | None:
        """The cause, if its fall is sure, large, and common to most of its pairs."""
        gain, kind, who, scope, way = candidate
        z_least = self.sure["path" in kind]
        if gain < z_least**2:
            return None
        mask = self._mask(kind, who, scope, way) & np.isfinite(self.z)
        value = self.z[mask]
        z = float(-value.sum() / np.sqrt(len(value)))
        fall = float(np.clip(self.off[mask], -4, 1).mean())
        if z < z_least or fall > -_FALL or ("path" in kind and fall > -0.16):
            return None
        if "path" not in kind and not _is_of_many(value, _ALONE[self.heavy] * z_least):
            return None
        if not self._is_common(kind, who, mask) or (kind == "path" and not self._is_no_tail(who, way)):
            return None
        if kind in ("gpu", "node", "rail") and not self._stands_out(kind, who, scope, mask, fall):
            return None
        cells = np.flatnonzero(mask.reshape(-1))
        return Cause(kind, who, way == "both", scope, way, cells, fall, z)

    def _is_no_tail(self, who: tuple[int, ...], way: str) -> bool:
        """Whether a path is slower than noise makes single pairs, and in both directions if it says so."""
        one, other = who
        there, back = self.raw[one, other], self.raw[other, one]
        if way == "both" and not max(there, back) < 0.35 * max(min(there, back), -WORST):
            return False
        if self.grid.failed[one, other]:
            return True
        inside = bool(self.inside[one, other])
        deviations, share = self.tail[int(not inside)]
        if way == "tx" and not (there < -1.35 * deviations and -np.expm1(self.off[one, other]) > 1.35 * share):
            return False
        rest = np.isfinite(self.z) & (self.inside == inside)
        if way == "both":
            return _is_apart(there + back, (self.raw + self.raw.T)[rest & rest.T], 1.6)
        if self.heavy:  # then a single measurement may stray far
            fall = self.off[one, other]
            return bool(fall < _FIFTH) or (fall < _THIRD and _is_apart(there, self.raw[rest], 3.0))
        return _is_apart(there, self.raw[rest], 2.0)

    def _is_common(self, kind: str, who: tuple[int, ...], mask: Any) -> bool:
        """Whether most of the partners, and most of the GPUs of a node, see the fall."""
        if kind in ("path", "cross"):
            return True
        half = self.z[mask].mean() / 2
        least = 0.7 if kind == "node-path" else 0.9 if len(self.grid.hosts) < 4 else 0.6  # one GPU of few spoils 2/3
        if kind in ("rail", "node-path") and np.mean(self.z[mask] < half) < least:
            return False
        value = np.where(mask, self.z, 0)
        count = mask.astype(np.int64)
        total, number = value.sum(axis=1) + value.sum(axis=0), count.sum(axis=1) + count.sum(axis=0)
        of_rail, of_node = self.grid.rail, self.grid.node
        if kind == "gpu":
            others = np.arange(self.grid.size) != who[0]
            return _share(total, number, others, half) >= 0.65
        if kind == "rail":
            return _share(total, number, of_rail == who[0], half) >= 0.7
        if kind == "node-path":
            return all(_share(total, number, of_node == one, half) >= 0.75 for one in who)
        own = of_node == who[0]
        partners = np.bincount(of_node, total * ~own, minlength=len(self.grid.hosts))
        numbers = np.bincount(of_node, number * ~own, minlength=len(self.grid.hosts))
        there = numbers > 0
        shared = np.mean(partners[there] / numbers[there] < half) if there.any() else 1.0
        return _share(total, number, own, half) >= 0.75 and bool(shared >= 0.65)

    def _stands_out(self, kind: str, who: tuple[int, ...], scope: str, mask: Any, fall: float) -> bool:
        """Whether the fall is more than siblings differ among each other, where there are several."""
        rest = np.isfinite(self.z) & ~mask
        if scope != "all":
            rest &= self.inside if scope == "intra" else ~self.inside
        off = np.where(rest, np.clip(np.nan_to_num(self.off, nan=0.0), -4, 1), 0)
        total, number = off.sum(axis=1) + off.sum(axis=0), rest.sum(axis=1) + rest.sum(axis=0)
        if kind != "gpu":
            group = self.grid.node if kind == "node" else self.grid.rail
            total, number = np.bincount(group, total), np.bincount(group, number)
        there = number > 0
        there[who[0]] = False
        if there.sum() < 3:
            return True
        others = total[there] / number[there]
        middle = np.median(others)
        above = others[others >= middle] - middle
        return bool(fall < middle - max(_FALL * 0.8, 4.5 * 1.4826 * float(np.median(above))))


def _is_apart(found: float, values: Any, times: float) -> bool:
    """Whether a gap parts `found`, and what is lower, from the rest of `values`; the tail of noise has none."""
    most = min(len(values) - 1, max(6, len(values) // 50))
    if most < 1:
        return True
    low = np.minimum(np.sort(np.partition(values, most)[: most + 1]), -2.0)
    gaps = low[:-1] / low[1:] >= times
    return bool((gaps & (found <= low[:-1] + 1e-9)).any())


def _is_of_many(value: Any, least: float) -> bool:
    """Whether a fall is sure without its worst pair too: of few pairs one that strayed pulls the mean down."""
    rest = np.sort(value)[1:]
    return not len(rest) or float(-rest.sum() / np.sqrt(len(rest))) >= least


def _highest(values: Any, most: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.clip(known.max(), 0, most)) if len(known) else 0.0


def _gain(total: Any, count: Any) -> Any:
    return np.where(total < 0, total * total / np.maximum(count, 1), 0.0)


def _top(gain: Any, most: int = 12) -> Any:
    """The indices of the largest values above nothing."""
    best = np.argpartition(-gain, most)[:most] if len(gain) > most else np.arange(len(gain))
    return best[gain[best] > 0]


def _share(total: Any, number: Any, among: Any, half: float) -> float:
    there = among & (number > 0)
    return float(np.mean(total[there] / number[there] < half)) if there.any() else 0.0
