"""Several causes that are one: paths that share an end, GPUs that are a whole node, two directions of a path."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from mldebug.cluster.pairs._grid import Grid
from mldebug.cluster.pairs._search import Cause

_HUB = 3  # paths that share an end are that end's trouble, from so many on
_HALF = -0.7
_LITTLE = -0.4  # of logarithms: what uplinks of a switch lack by design is more than that, mostly
_SHARE = 0.2  # and where they are this share of its paths


def merge(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """`causes` with those joined that are one, strongest first."""
    causes = _same(causes)
    causes = _bundles(cells, causes)
    causes = _hubs(cells, causes, "node-path", "node")
    causes = _hubs(cells, causes, "path", "gpu")
    causes = _whole_nodes(cells, _same(causes))
    causes = _plain(cells, _within(cells, causes))
    return sorted(causes, key=lambda cause: (cause.fall * min(cause.z, 30), cause.kind, cause.who))


def without_patterns(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """In a sample, paths between nodes that are slow alike, or only a little, are how the fabric is built."""
    nodes = len(cells.hosts)
    between = cells.node[:, None] != cells.node[None, :]
    if (between & (cells.measured | cells.measured.T)).sum() > 0.6 * between.sum():
        return causes
    slow = [
        cause
        for cause in causes
        if (cause.kind == "node-path" or (cause.kind == "path" and nodes == cells.size))
        and not cells.failed.reshape(-1)[cause.cells].any()
    ]
    built = [
        cause for cause in slow if cause.fall > _LITTLE or sum(abs(cause.fall - other.fall) < 0.1 for other in slow) > 1
    ]
    return [cause for cause in causes if not any(cause is one for one in built)]


def _plain(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """Beside another cause, one measurement that is somewhat slow is no path: noise has such too."""
    if len(causes) < 2:
        return causes
    return [
        cause
        for cause in causes
        if cause.kind != "path"
        or len(cause.cells) > 1
        or cause.fall < _HALF
        or cells.failed.reshape(-1)[cause.cells].any()
    ]


def _same(causes: list[Cause]) -> list[Cause]:
    """One cause for each thing: a GPU that sends badly and receives badly is one."""
    found: dict[tuple[str, tuple[int, ...]], Cause] = {}
    for cause in causes:
        key = cause.kind, tuple(sorted(cause.who))
        found[key] = join(found[key], cause) if key in found else cause
    return list(found.values())


def join(*causes: Cause) -> Cause:
    """The first of `causes` with the pairs of all."""
    first = causes[0]
    cells = np.unique(np.concatenate([cause.cells for cause in causes]))
    way = first.way if len({(cause.way, cause.who) for cause in causes}) == 1 else "both"
    scope = first.scope if len({cause.scope for cause in causes}) == 1 else "all"
    fall = min(cause.fall for cause in causes)
    return replace(first, cells=cells, way=way, scope=scope, fall=fall, z=max(cause.z for cause in causes))


def _bundles(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """Three and more paths between the same two nodes, from several GPUs to several, are the nodes' path."""
    between: dict[tuple[int, int], list[Cause]] = defaultdict(list)
    for cause in causes:
        if cause.kind == "path":
            one, other = sorted(int(cells.node[gpu]) for gpu in cause.who)
            if one != other:
                between[one, other].append(cause)
    for ends, paths in between.items():
        ours = {gpu for cause in paths for gpu in cause.who}
        known = (cells.measured | cells.measured.T)[np.ix_(cells.members(ends[0]), cells.members(ends[1]))]
        if len(paths) >= max(_HUB, _SHARE * known.sum()) and all(
            (cells.node[list(ours)] == end).sum() >= 2 for end in ends
        ):
            causes = [cause for cause in causes if not any(cause is path for path in paths)]
            causes.append(replace(join(*paths), kind="node-path", who=ends, way="both", scope="inter"))
    return causes


def _hubs(cells: Grid, causes: list[Cause], path: str, end: str) -> list[Cause]:
    """Three and more paths that share an end are that end, which is bad now and then."""
    while True:
        paths: dict[int, list[Cause]] = defaultdict(list)
        for cause in causes:
            if cause.kind == path:
                for one in cause.who:
                    paths[one].append(cause)
        if not paths:
            return causes
        hub, own = max(paths.items(), key=lambda item: (len(item[1]), -item[0]))
        if len(own) < _HUB or len(own) < _SHARE * _partners(cells, hub, end):
            return causes
        kind, who = end, hub
        if end == "gpu" and len(cells.members(int(cells.node[hub]))) == 1:
            kind, who = "node", int(cells.node[hub])
        causes = [cause for cause in causes if not any(cause is one for one in own)]
        causes.append(replace(join(*own), kind=kind, who=(who,), way="both"))


def _partners(cells: Grid, one: int, end: str) -> int:
    """How many others it was measured with."""
    known = cells.measured | cells.measured.T
    if end == "gpu":
        return int(known[one].sum())
    others = np.unique(cells.node[known[cells.members(one)].any(axis=0)])
    return int((others != one).sum())


def _whole_nodes(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """All GPUs of a node are the node."""
    by_node: dict[int, list[Cause]] = defaultdict(list)
    for cause in causes:
        if cause.kind == "gpu":
            by_node[int(cells.node[cause.who[0]])].append(cause)
    for node, own in by_node.items():
        if len(own) > 1 and len(own) == len(cells.members(node)):
            causes = [cause for cause in causes if not any(cause is one for one in own)]
            causes.append(replace(join(*own), kind="node", who=(node,)))
    return _same(causes)


def _within(cells: Grid, causes: list[Cause]) -> list[Cause]:
    """Without the parts of what is named already: paths and GPUs of a bad node, paths of a bad GPU."""
    nodes = {cause.who[0] for cause in causes if cause.kind == "node"}
    gpus = {cause.who[0] for cause in causes if cause.kind == "gpu"}
    isolated = any(cause.kind == "cross" for cause in causes)
    kept = []
    for cause in causes:
        ends = cause.who
        if cause.kind == "rail":
            own = set(np.flatnonzero(cells.rail == ends[0]).tolist())
            if own <= gpus or (isolated and cause.scope == "cross"):
                continue
        if cause.kind in ("gpu", "path"):
            if any(int(cells.node[end]) in nodes for end in ends):
                continue
            if cause.kind == "path" and any(end in gpus for end in ends):
                continue
        if cause.kind == "node-path" and any(end in nodes for end in ends):
            continue
        kept.append(cause)
    return kept
