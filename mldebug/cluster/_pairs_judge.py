"""judge_pairs(): from a matrix of pairs to the GPU, node or path that is bad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mldebug.cluster._pairs_evidence import FAILED, PairsEvidence, check_evidence
from mldebug.cluster._pairs_expect import expect
from mldebug.cluster._pairs_grid import Grid, grid
from mldebug.cluster._pairs_merge import merge, without_patterns
from mldebug.cluster._pairs_search import WORST, Cause, explain
from mldebug.cluster._pairs_verdict import PairsVerdict
from mldebug.cluster._pairs_words import verdict_of

_NOTHING = -4.0  # the logarithm that a failed pair counts with


def judge_pairs(evidence: PairsEvidence) -> PairsVerdict:
    """Which GPU, node or path of `evidence` is bad: slow beside its siblings, or failing.

    Siblings are pairs of the same class: the same places in other nodes, the same rail between nodes, different rails
    between nodes; nothing is compared with a bandwidth known beforehand. Raises UsageError for what is no pair matrix.

        judge_pairs(load_pairs("pairs.csv")).culprits  # ("node7:3",)
    """
    check_evidence(evidence)
    cells = grid(evidence)
    if not cells.measured.any():
        return PairsVerdict("none", confidence="low", reading="no pair was measured, so nothing can be said of any GPU")
    blamed = _blamed(cells, evidence.get("blame", []))
    gone = [*_absent(cells), *_dead(cells, blamed)]
    off, z = distances(cells)
    for cause in (*blamed, *gone):
        z.reshape(-1)[cause.cells] = np.nan
    found = merge(cells, [*gone, *without_patterns(cells, explain(cells, off, z))])
    known = merge(cells, blamed)  # apart: what was seen is not to be taken for a part of what is inferred
    names = {(cause.kind, cause.who) for cause in known}
    return verdict_of(cells, [*known, *(cause for cause in found if (cause.kind, cause.who) not in names)])


def distances(cells: Grid) -> tuple[Any, Any]:
    """(logarithm of measured to expected, the same in standard deviations) of each pair; NaN: not measured."""
    wanted = expect(cells)
    off = cells.rate - wanted.base
    z = off / wanted.noise
    failed = cells.failed > 0
    off[failed], z[failed] = _NOTHING, -WORST
    unknown = np.isnan(z)
    off[unknown] = z[unknown] = np.where(cells.well[unknown], 0.0, np.nan)  # good, as far as one knows
    return off, z


def _absent(cells: Grid) -> list[Cause]:
    """GPUs that should have been measured and never were, where others were."""
    known = cells.measured.sum(axis=1) + cells.measured.sum(axis=0)
    wanted = cells.seen.sum(axis=1) + cells.seen.sum(axis=0)
    nothing = (known == 0) & (wanted > 0)
    if not nothing.any() or nothing.mean() > 0.5:
        return []
    return [_whole(cells, int(one)) for one in np.flatnonzero(nothing)]


def _blamed(cells: Grid, blame: list[dict[str, Any]]) -> list[Cause]:
    """What a live run saw of one end: its worker died, was stopped or never started. Its peers are not to blame."""
    number = {name: place for place, name in enumerate(cells.names)}
    whys: dict[int, list[str]] = {}
    masks: dict[int, Any] = {}
    for entry in blame:
        one = number.get(str(entry.get("gpu")))
        if one is None or entry.get("what") not in ("dead", "stopped", "start"):
            continue
        peers = [number[name] for name in entry.get("with", []) if name in number] or list(range(cells.size))
        mask = masks.setdefault(one, np.zeros_like(cells.seen))
        mask[one, peers] = mask[peers, one] = True
        whole = not entry.get("with")  # it is gone for good, and that says all
        whys[one] = [str(entry.get("why"))] if whole else [*whys.get(one, []), str(entry.get("why"))]
    found, taken = [], np.zeros_like(cells.seen)
    for one, mask in masks.items():
        own = mask & (cells.failed > 0) & ~taken
        taken |= own
        if own.any():
            more = len(whys[one]) - 1
            why = whys[one][0] + (f", and {more} time{'s' if more > 1 else ''} more" if more else "")
            found.append(replace(_whole(cells, one), cells=np.flatnonzero(own.reshape(-1)), why=why))
    return found


def _dead(cells: Grid, known: list[Cause]) -> list[Cause]:
    """Workers that died: their first pairs may have been fine, so not all of them need to be bad."""
    dead = cells.failed == 1 + FAILED.index("dead")
    for cause in known:
        dead.reshape(-1)[cause.cells] = False
    found: list[Cause] = []
    while dead.any():
        partners = (dead | dead.T).sum(axis=1)
        most = int(np.argmax(partners))
        if partners[most] < 2:
            break
        found.append(_whole(cells, most))
        dead[most, :] = dead[:, most] = False
    return found


def _whole(cells: Grid, one: int) -> Cause:
    mask = np.zeros_like(cells.seen)
    mask[one, :] = mask[:, one] = True
    kind, who = ("gpu", one) if len(cells.members(int(cells.node[one]))) > 1 else ("node", int(cells.node[one]))
    return Cause(kind, (who,), True, "all", "both", np.flatnonzero((mask & cells.seen).reshape(-1)), _NOTHING, WORST)
