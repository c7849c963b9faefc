"""The causes in words: names, a sentence for each, and what to do next."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import FAILED
from mldebug.cluster.pairs._grid import Grid
from mldebug.cluster.pairs._search import Cause
from mldebug.cluster.pairs._verdict import Finding, PairsVerdict


def verdict_of(cells: Grid, causes: list[Cause]) -> PairsVerdict:
    """The verdict that names `causes`."""
    pairs = int(cells.measured.sum())
    if not causes:
        few = cells.size < 4 or pairs < 6
        reading = f"no GPU, node or path stands out among {pairs} measured pair{'s' if pairs != 1 else ''}"
        if few:
            reading += ", too few to compare: a fault that all of them share would not show"
        return PairsVerdict("none", (), "low" if few else "high", reading)
    findings = tuple(_finding(cells, cause) for cause in causes)
    kinds = {found.kind for found in findings}
    kind = kinds.pop() if len(findings) == 1 or kinds == {"inter-rail"} else "several"
    culprits = tuple(found.name for found in findings if found.name)
    reading = "; ".join(found.reading for found in findings[:3])
    if len(findings) > 3:
        reading += f"; and {len(findings) - 3} more"
    return PairsVerdict(kind, culprits, _confidence(cells, causes), reading, _hint(kind, cells, causes), findings)


def _finding(cells: Grid, cause: Cause) -> Finding:
    kind = {"node-path": "path", "rail": "inter-rail", "cross": "inter-rail"}.get(cause.kind, cause.kind)
    name = name_of(cells, cause)
    failed = cells.failed.reshape(-1)[cause.cells]
    known = cells.measured.reshape(-1)[cause.cells]
    bad, many = int((failed > 0).sum()), int(known.sum())
    ratio = 0.0 if 2 * bad >= max(many, 1) else float(np.exp(cause.fall))
    return Finding(kind, name, _sentence(cells, cause, name, failed[failed > 0], many, ratio), ratio, cause.z, many)


def name_of(cells: Grid, cause: Cause) -> str:
    """`host:gpu`, `host`, `rail 3`, `a:0 -> b:1`, `a <-> b`; "" for the whole fabric."""
    if cause.kind == "gpu":
        return cells.names[cause.who[0]]
    if cause.kind == "node":
        return cells.hosts[cause.who[0]]
    if cause.kind == "rail":
        return f"rail {cells.rails[cause.who[0]]}"
    if cause.kind == "cross":
        return ""
    names = cells.names if cause.kind == "path" else cells.hosts
    one, other = (names[end] for end in cause.who)
    return f"{one} <-> {other}" if cause.way == "both" else f"{one} -> {other}"


def _sentence(cells: Grid, cause: Cause, name: str, failed: Any, many: int, ratio: float) -> str:
    subject = {
        "gpu": f"GPU {name}", "node": f"node {name}", "cross": "the fabric", "rail": name,
        "path": f"the path {name}", "node-path": f"the path {name}",
    }[cause.kind]  # fmt: skip
    if not many:
        return f"{subject} was never measured{': ' if cause.why else ''}{cause.why}"
    if cause.kind == "cross":
        what = _ways_to_fail(failed, many) if len(failed) else f"reach {ratio:.0%} of those on the same rail"
        return f"the rails are isolated: pairs of different nodes on the same rail are fine, others {what}"
    if cause.why:
        return f"{subject} is bad: {cause.why}"
    side = {"tx": " when it sends", "rx": " when it receives", "both": ""}[cause.way]
    side = "" if "path" in cause.kind else side
    place = {"inter": " to other nodes", "intra": " within its node", "cross": " to other rails"}.get(cause.scope, "")
    place = "" if "path" in cause.kind or len(cells.hosts) == 1 else place
    if len(failed):
        words = f"{subject} is bad{side}{place}: {_ways_to_fail(failed, many)}"
    else:
        words = f"{subject} is slow{side}{place}: {ratio:.0%} of its siblings' bandwidth"
    if cells.flaps.reshape(-1)[cause.cells].any():
        words += ", in some rounds and not in others"
    return words


def _ways_to_fail(failed: Any, many: int) -> str:
    """`12 of 14 pairs hang`, `1 pair wrong contents`."""
    count = Counter(FAILED[code - 1] for code in failed)
    verbs = {"hang": "hang", "error": "end with an error", "wrong": "deliver wrong bytes", "dead": "lose a worker"}
    parts = [
        f"{number} of {many} pair{'s' if many != 1 else ''} {verbs[status]}" for status, number in count.most_common()
    ]
    return ", ".join(parts)


def _confidence(cells: Grid, causes: list[Cause]) -> str:
    weakest = min(causes, key=lambda cause: cause.z)
    siblings = cells.size - len({end for cause in causes for end in cause.who})
    if weakest.z >= 9 and weakest.fall < -0.2 and siblings >= 4 and cells.size >= 5:
        return "high"
    return "medium" if weakest.z >= 6 and siblings >= 2 and cells.size > 3 else "low"


def _hint(kind: str, cells: Grid, causes: list[Cause]) -> str:
    first = causes[0]
    wrong = (cells.failed.reshape(-1)[first.cells] == 1 + FAILED.index("wrong")).any()
    if wrong and len(cells.hosts) >= 1 and first.kind in ("gpu", "path") and first.scope != "inter":
        return (
            "look for PCIe ACS and an IOMMU that translates (iommu=pt, setpci ECAP_ACS+6.w=0): both corrupt peer copies"
        )
    return _HINTS[kind]


_HINTS = {
    "gpu": "run `mldebug doctor` on its node: PCIe width, NVLink, ECC, network card; then measure again without it",
    "node": "run `mldebug doctor` there: network cards, drivers, NCCL settings; leave it out of the next run",
    "inter-rail": "ask for routes between the rails; until then NCCL_CROSS_NIC=0 keeps rings on theirs",
    "path": "look at cable, port and switch between both ends: with all others these are fine",
    "several": "take the named ones out and measure again; what shares a switch or a rack may be one fault",
}
