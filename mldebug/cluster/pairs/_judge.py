"""judge_pairs(): from a matrix of pairs to the GPU, node or path that is bad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import FAILED, PairsEvidence, check_evidence, is_ping
from mldebug.cluster.pairs._expect import expect
from mldebug.cluster.pairs._grid import Grid, grid
from mldebug.cluster.pairs._merge import merge, without_patterns
from mldebug.cluster.pairs._noise import is_noisy, steady
from mldebug.cluster.pairs._ping_judge import explained, names_blamed, plain
from mldebug.cluster.pairs._search import WORST, Cause, explain
from mldebug.cluster.pairs._verdict import PairsVerdict
from mldebug.cluster.pairs._words import verdict_of

_HALF = -0.7
_NOTHING = -4.0  # the logarithm that a failed pair counts with


def judge_pairs(evidence: PairsEvidence) -> PairsVerdict:
    """Which GPU, node or path of `evidence` is bad: slow beside its siblings, or failing.

    Siblings are pairs of the same class: the same places in other nodes, the same rail between nodes, different rails
    between nodes; nothing is compared with a bandwidth known beforehand. Raises UsageError for what is no pair matrix.

        judge_pairs(load_pairs("pairs.csv")).culprits  # ("node7:3",)
    """
    check_evidence(evidence)
    over_tcp = is_ping(evidence)
    cells = grid(plain(evidence) if over_tcp else steady(evidence) if is_noisy(evidence) else evidence)
    blame = evidence.get("blame", [])
    if not cells.measured.any() and not any(entry.get("what") == "missing" for entry in blame):
        return PairsVerdict("none", confidence="low", reading="no pair was measured, so nothing can be said of any GPU")
    blamed = _blamed(cells, blame)
    gone = [*_absent(cells, blame), *_dead(cells, blamed)]
    off, z = distances(cells)
    for cause in (*blamed, *gone):
        z.reshape(-1)[cause.cells] = np.nan
    found = merge(cells, [*gone, *without_patterns(cells, explain(cells, off, z))])
    if is_noisy(evidence):
        found = [cause for cause in found if plain_enough(cells, cause)]
    known = merge(cells, blamed)  # apart: what was seen is not to be taken for a part of what is inferred
    if over_tcp:
        known = [*known, *names_blamed(cells, evidence)]
        found = explained(cells, evidence, found)
    names = {(cause.kind, cause.who) for cause in known}
    return verdict_of(cells, [*known, *(cause for cause in found if (cause.kind, cause.who) not in names)])


def plain_enough(cells: Grid, cause: Cause) -> bool:
    """Whether a cause is more than what CPUs that others use, too, do to a few pairs of a worker."""
    return bool(cells.failed.reshape(-1)[cause.cells].any()) or cause.fall < _HALF


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


def _absent(cells: Grid, blame: list[dict[str, Any]]) -> list[Cause]:
    """GPUs that should have been measured and never were, where others were."""
    known = cells.measured.sum(axis=1) + cells.measured.sum(axis=0)
    wanted = cells.seen.sum(axis=1) + cells.seen.sum(axis=0)
    nothing = (known == 0) & (wanted > 0)
    whys = {entry.get("gpu"): str(entry.get("why")) for entry in blame if entry.get("what") == "missing"}
    told = np.array([name in whys for name in cells.names], dtype=bool)  # a live run knows it, of how many ever
    if (nothing & ~told).mean() > 0.5 or (told.any() and not cells.measured.any()):
        nothing &= told
    return [replace(_whole(cells, int(one)), why=whys.get(cells.names[one], "")) for one in np.flatnonzero(nothing)]


def _blamed(cells: Grid, blame: list[dict[str, Any]]) -> list[Cause]:
    """What a live run saw of one end: its worker died, was stopped or never started. Its peers are not to blame."""
    number = {name: place for place, name in enumerate(cells.names)}
    whys: dict[int, list[str]] = {}
    masks: dict[int, Any] = {}
    gone: set[int] = set()
    for entry in blame:
        one = number.get(str(entry.get("gpu")))
        if one is None or entry.get("what") not in ("dead", "stopped", "start"):
            continue
        peers = [number[name] for name in entry.get("with", []) if name in number] or list(range(cells.size))
        mask = masks.setdefault(one, np.zeros_like(cells.seen))
        mask[one, peers] = mask[peers, one] = True
        whole = not entry.get("with")  # it is gone for good, and that says all
        gone |= {one} if whole else set()
        whys[one] = [str(entry.get("why"))] if whole else [*whys.get(one, []), str(entry.get("why"))]
    found, taken = [], np.zeros_like(cells.seen)
    for one, mask in masks.items():
        own = mask & (cells.failed > 0) & ~taken
        taken |= own
        if not own.any() and one in gone:  # both ends of its pairs are
            own = mask & (cells.failed > 0)
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
