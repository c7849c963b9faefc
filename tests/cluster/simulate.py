"""Pair matrices of clusters that do not exist: healthy ones of many builds, and the same with a planted fault.

    case = planted(7)      # or healthy(7)
    judge_pairs(case.evidence)   # should say case.kind and case.culprits

Everything follows from the seed. A fault is planted only where it can be seen: a link at 85% of its bandwidth cannot
under noise of 8% in a single measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import SCHEMA, PairsEvidence

SHAPES = (
    (1, 3),
    (1, 4),
    (1, 8),
    (1, 16),
    (2, 4),
    (2, 8),
    (3, 4),
    (3, 8),
    (4, 2),
    (5, 3),
    (8, 1),
    (12, 1),
    (10, 4),
    (4, 4),
    (4, 8),
    (6, 8),
    (8, 8),
    (16, 8),
)  # nodes, GPUs of each
FORMS = (*("full",) * 5, "one way", "diagonal", "rounds", "shuffled", "holes")
SEEN = 8.0  # standard deviations: how plain a fault must be to be planted


@dataclass
class Case:
    kind: str
    culprits: tuple[str, ...]
    evidence: PairsEvidence
    story: str


@dataclass
class Cluster:
    """`rate` holds GBps for each pair; `status` what each ended as ("" is ok)."""

    hosts: list[str]
    labels: list[list[str]]
    noise: float
    rate: Any
    story: list[str] = field(default_factory=list)
    status: Any = None
    flaps: Any = None

    def __post_init__(self) -> None:
        self.node = np.repeat(np.arange(len(self.hosts)), [len(own) for own in self.labels])
        self.rail = np.concatenate([np.arange(len(own)) for own in self.labels])
        self.names = [f"{host}:{label}" for host, own in zip(self.hosts, self.labels, strict=True) for label in own]
        self.inside = self.node[:, None] == self.node[None, :]
        self.status = np.full(self.rate.shape, "ok", dtype=object)
        self.flaps = np.zeros(self.rate.shape, dtype=bool)


def build(rng: Any, nodes: int, gpus: int, *, noise: float | None = None, plain: bool = False) -> Cluster:
    """A healthy cluster: links of several kinds, switches with few uplinks, GPUs of two kinds."""
    noise = float(rng.choice([0.01, 0.02, 0.04, 0.08])) if noise is None else noise
    story = [f"{nodes} x {gpus}, noise {noise:.0%}"]
    size = nodes * gpus
    node, rail = np.divmod(np.arange(size), gpus)
    inside = node[:, None] == node[None, :]
    link = _links(rng, nodes, gpus, story, plain)
    fast = float(10 ** rng.uniform(0.5, 2.7))
    net = fast * float(rng.uniform(0.02, 1.0))
    rate = np.where(inside, fast * np.tile(link, (nodes, nodes)), net)
    same = rail[:, None] == rail[None, :]
    if not plain:
        _vary_net(rng, rate, inside, same, node, rail, nodes, gpus, story)
    labels, hosts = _names(rng, nodes, gpus)
    if nodes > 2 and gpus > 3 and not plain and rng.random() < 0.1:
        short, left = int(rng.integers(nodes)), int(rng.integers(2, gpus))
        keep = (node != short) | (rail < left)
        rate, labels[short] = rate[np.ix_(keep, keep)], labels[short][:left]
        story.append(f"one node has {left} GPUs")
    return Cluster(hosts, labels, noise, rate, story)


def _links(rng: Any, nodes: int, gpus: int, story: list[str], plain: bool) -> Any:
    link = np.ones((gpus, gpus))
    kind = "switch" if plain else str(rng.choice(["switch", "switch", "numa", "bridges", "one bridge", "mesh"]))
    slow = float(rng.choice([0.1, 0.25, 0.5, 0.7]))
    at = np.arange(gpus)
    if kind == "numa" and gpus >= (4 if nodes > 1 else 6):
        link = np.where((at[:, None] * 2 // gpus) == (at[None, :] * 2 // gpus), 1.0, slow)
    elif kind == "bridges" and gpus >= (4 if nodes > 1 else 6) and gpus % 2 == 0:
        link = np.where(at[:, None] // 2 == at[None, :] // 2, 1.0, slow)
    elif kind == "one bridge" and gpus >= 6:
        link = np.full((gpus, gpus), slow)
        link[gpus - 2, gpus - 1] = link[gpus - 1, gpus - 2] = 1.0
    elif kind == "mesh" and gpus == 8:  # the hybrid cube mesh of V100: double links, single ones, and PCIe
        link = np.full((8, 8), 0.2)
        double = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
        single = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
        for pairs, value in ((double, 1.0), (single, 0.5)):
            for one, other in pairs:
                link[one, other] = link[other, one] = value
    else:
        kind = "switch"
    story.append(kind)
    return link


def _vary_net(
    rng: Any, rate: Any, inside: Any, same: Any, node: Any, rail: Any, nodes: int, gpus: int, story: list[str]
) -> None:
    if nodes > 1 and rng.random() < 0.4:
        factor = float(rng.choice([0.5, 0.7, 0.9]))
        rate[~inside & ~same] *= factor
        story.append(f"other rails {factor}")
    leaf = nodes
    if nodes > 4 and rng.random() < 0.3:
        leaf = int(rng.choice([size for size in (2, 4, 8) if nodes % size == 0 and size < nodes] or [nodes]))
        factor = float(rng.choice([0.3, 0.5, 0.8]))
        rate[~inside & (node[:, None] // leaf != node[None, :] // leaf)] *= factor
        story.append(f"leaves of {leaf}, {factor} across")
    if nodes >= 6 and rng.random() < 0.2 and (leaf == nodes or nodes % (4 * leaf) == 0):
        factor = float(rng.choice([0.4, 0.6]))
        old = node >= nodes // 2
        rate[old[:, None] | old[None, :]] *= factor
        story.append(f"half of the nodes older, {factor}")
    if nodes * gpus >= 8 and rng.random() < 0.2:
        factor = float(rng.choice([0.8, 0.9]))
        rate[np.tril_indices(len(rate), -1)] *= factor
        story.append(f"{factor} towards the earlier")
    if nodes > 1 and gpus >= 4 and rng.random() < 0.15:
        far = rail >= gpus // 2
        rate[~inside & (far[:, None] | far[None, :])] *= 0.8
        story.append("half of the GPUs far from their network card")
    if rng.random() < 0.3:
        rate *= np.exp(rng.normal(0, 0.02, rate.shape))
        story.append("links differ by 2%")


def _names(rng: Any, nodes: int, gpus: int) -> tuple[list[list[str]], list[str]]:
    pattern = str(rng.choice(["node{}", "gpu-a100-{:03}", "ip-10-0-{}-17", "h{}.rack-2.example.org", "10.1.0.{}"]))
    start = int(rng.integers(0, 12))
    hosts = [pattern.format(start + i) for i in range(nodes)]
    kind = str(rng.choice(["index", "index", "index", "cuda", "uuid", "rank"]))
    if kind == "uuid":
        return [[f"GPU-{rng.integers(16**8):08x}-{i:02x}" for _ in range(gpus)] for i in range(nodes)], hosts
    if kind == "rank":
        return [[str(i * gpus + j) for j in range(gpus)] for i in range(nodes)], hosts
    return [[f"cuda{j}" if kind == "cuda" else str(j) for j in range(gpus)] for _ in range(nodes)], hosts


def measure(rng: Any, cluster: Cluster, *, form: str | None = None) -> PairsEvidence:
    """What a run over the cluster would have written down, whole or in part."""
    size = len(cluster.names)
    form = str(rng.choice(FORMS)) if form is None else form
    cluster.story.append(form)
    wanted = ~np.eye(size, dtype=bool)
    if form == "one way":
        wanted = np.triu(wanted)
    if form == "diagonal":
        wanted[:] = True
    if form == "holes":
        wanted &= rng.random((size, size)) > 0.2
    if form == "sample":
        wanted = _sample(rng, cluster)
    src, dst = np.nonzero(wanted)
    if form == "shuffled":
        order = rng.permutation(len(src))
        src, dst = src[order], dst[order]
    rounds = 4 if form == "rounds" or cluster.flaps.any() else 1
    out: PairsEvidence = {
        "schema": SCHEMA, "gpus": list(cluster.names), "src": [], "dst": [], "gbps": [], "status": [], "notes": [],
    }  # fmt: skip
    number: list[int | None] = []
    for turn in range(rounds):
        gbps = cluster.rate[src, dst] * np.exp(rng.normal(0, cluster.noise, len(src)))
        flapping = cluster.flaps[src, dst] & (turn % 2 == 1)
        gbps = np.where(flapping, gbps * 0.2, gbps)
        status = cluster.status[src, dst]
        gone = rng.random(len(src)) < 0.005 if form == "holes" else np.zeros(len(src), dtype=bool)
        for i in range(len(src)):
            failed = status[i] != "ok"
            out["src"].append(int(src[i]))
            out["dst"].append(int(dst[i]))
            out["gbps"].append(None if (failed and status[i] != "wrong") or gone[i] else float(gbps[i]))
            out["status"].append(str(status[i]))
            number.append(turn)
    if rounds > 1:
        out["round"] = number
    return out


def _sample(rng: Any, cluster: Cluster) -> Any:
    """All pairs within nodes, one shift of the nodes along the rails, and one random shift."""
    size, nodes = len(cluster.names), len(cluster.hosts)
    wanted = cluster.inside & ~np.eye(size, dtype=bool)
    gpus = int(cluster.rail.max()) + 1
    place = np.full((nodes, gpus), -1)
    place[cluster.node, cluster.rail] = np.arange(size)
    for shift, rail in ((1, 0), (int(rng.integers(2, max(nodes - 1, 3))), int(rng.integers(1, max(gpus, 2))))):
        other = place[(cluster.node + shift) % nodes, (cluster.rail + rail) % gpus]
        one = np.flatnonzero(other >= 0)
        wanted[one, other[one]] = wanted[other[one], one] = True
    np.fill_diagonal(wanted, False)
    return wanted


def healthy(seed: int) -> Case:
    """A cluster without a fault."""
    rng = np.random.default_rng((seed, 1))
    nodes, gpus = (
        SHAPES[int(rng.integers(len(SHAPES)))] if seed % 10 else ((1, 2), (2, 1), (2, 2))[int(rng.integers(3))]
    )
    cluster = build(rng, nodes, gpus)
    form = "sample" if nodes >= 6 and rng.random() < 0.3 else None
    evidence = measure(rng, cluster, form=form)
    return Case("none", (), evidence, ", ".join(cluster.story))


SAMPLED = ("gpu slow", "gpu fails", "gpu dead", "gpu wrong", "node fails", "rails", "mixed")  # what few pairs show
FAULTS = (
    "gpu slow", "gpu slow", "gpu tx", "gpu rx", "gpu net", "gpu fails", "gpu dead", "gpu wrong", "gpu flaps",
    "gpu dies",
    "node slow", "node net", "node fails", "node rx", "rails", "rails", "rails slow", "rail down",
    "path slow", "path fails", "path one way", "path flaps", "node path", "several gpus", "leaf", "mixed",
    "node alone", "all wrong", "node two",
)  # fmt: skip


def planted(seed: int, fault: str | None = None, shape: tuple[int, int] | None = None, form: str | None = None) -> Case:
    """A cluster with one of FAULTS; `form` says which pairs are measured."""
    rng = np.random.default_rng((seed, 2))
    fault = FAULTS[seed % len(FAULTS)] if fault is None else fault
    for _ in range(200):
        nodes, gpus = SHAPES[int(rng.integers(len(SHAPES)))] if shape is None else shape
        if not _has_room(fault, nodes, gpus):
            continue
        cluster = build(rng, nodes, gpus)
        factor = float(rng.uniform(0.1, 0.85))
        cluster.story.append(f"{fault} x{factor:.2f}")
        kind, culprits, cells = _plant(rng, cluster, fault, factor)
        if cells is None or abs(math.log(factor)) / max(cluster.noise, 0.03) * math.sqrt(cells) >= SEEN:
            if form is not None:
                return Case(kind, culprits, measure(rng, cluster, form=form), ", ".join(cluster.story))
            form = "full" if "path" in fault or len(cluster.names) < 12 else str(rng.choice(FORMS))
            if nodes >= 6 and fault in SAMPLED and rng.random() < 0.3:
                form = "sample"
            if form == "one way" and fault in ("gpu tx", "gpu rx", "node rx", "mixed"):
                form = "full"  # a member may have a single pair left in that direction
            return Case(kind, culprits, measure(rng, cluster, form=form), ", ".join(cluster.story))
    raise AssertionError(f"no cluster shows {fault}")


def _has_room(fault: str, nodes: int, gpus: int) -> bool:
    if fault == "leaf":
        return nodes >= 16
    if fault == "all wrong":
        return nodes == 1 and gpus > 3
    if fault == "node two":
        return nodes == 2 and gpus > 3
    if fault == "node alone":
        return nodes >= 3 and gpus == 1
    if gpus == 1 and nodes > 1 and ("gpu" in fault or fault == "path flaps"):
        return False
    if fault in ("gpu flaps", "gpu dies"):
        return nodes * gpus >= 8
    if fault in ("several gpus", "mixed"):
        return nodes >= 3 and gpus >= 4
    if fault in ("node path",):
        return nodes >= 4
    if fault.startswith(("rails", "rail ")):
        return nodes >= 2 and gpus >= (6 if fault == "rail down" else 4)
    if fault in ("node slow", "node net", "node fails", "node rx", "gpu net"):
        return nodes >= 3 and gpus >= 2
    return nodes * gpus >= (4 if "path" in fault else 3)


def _plant(rng: Any, cluster: Cluster, fault: str, factor: float) -> tuple[str, tuple[str, ...], int | None]:
    """Change the cluster; (kind, culprits, how many pairs show it, or None for what fails)."""
    size, nodes = len(cluster.names), len(cluster.hosts)
    one = int(rng.integers(size))
    node = int(rng.integers(nodes))
    bad = str(rng.choice(["hang", "error"]))
    at = np.arange(size)
    touches = (at[:, None] == one) | (at[None, :] == one)
    of_node = (cluster.node[:, None] == node) | (cluster.node[None, :] == node)
    between = ~cluster.inside
    same = cluster.rail[:, None] == cluster.rail[None, :]
    name, host = cluster.names[one], cluster.hosts[node]
    if fault in ("gpu slow", "gpu net", "gpu tx", "gpu rx"):
        mask = {
            "gpu slow": touches, "gpu net": touches & between,
            "gpu tx": np.broadcast_to((at == one)[:, None], touches.shape),
            "gpu rx": np.broadcast_to((at == one)[None, :], touches.shape),
        }[fault]  # fmt: skip
        cluster.rate[mask] *= factor
        return "gpu", (name,), int(mask.sum()) - 1
    if fault in ("gpu fails", "gpu dead", "gpu wrong"):
        cluster.status[touches] = {"gpu fails": bad, "gpu dead": "dead", "gpu wrong": "wrong"}[fault]
        return "gpu", (name,), None
    if fault in ("gpu flaps", "gpu dies"):  # half of its pairs: those of some rounds, or all from some round on
        half = rng.random((size, size)) < 0.5
        cluster.status[touches & (half | half.T)] = bad if fault == "gpu flaps" else "dead"
        return "gpu", (name,), None
    if fault == "all wrong":
        cluster.status[:] = "wrong"
        return "node", (host,), None
    if fault in ("node two", "node alone"):
        mask = of_node if fault == "node alone" else of_node & cluster.inside
        cluster.rate[mask] *= factor
        return "node", (host,), int(mask.sum())
    if fault in ("node slow", "node net", "node rx"):
        receives = np.broadcast_to((cluster.node == node)[None, :], touches.shape) & between
        mask = {"node slow": of_node, "node net": of_node & between, "node rx": receives}[fault]
        cluster.rate[mask] *= factor
        return "node", (host,), int(mask.sum())
    if fault == "node fails":
        cluster.status[of_node & between] = bad
        return "node", (host,), None
    if fault == "rails":
        cluster.status[between & ~same] = bad
        return "inter-rail", (), None
    if fault == "rails slow":
        cluster.rate[between & ~same] *= 0.1
        return "inter-rail", (), None
    if fault == "rail down":
        lost = rng.choice(int(cluster.rail.max()) + 1, size=int(rng.integers(1, 3)), replace=False)
        mask = between & (np.isin(cluster.rail, lost)[:, None] | np.isin(cluster.rail, lost)[None, :])
        cluster.status[mask] = bad
        labels = sorted(cluster.labels[0][rail] if _shared(cluster) else str(rail) for rail in lost)
        return "inter-rail", tuple(f"rail {label}" for label in labels), None
    if "path" in fault and fault != "node path":
        other = int(rng.choice(at[at != one]))
        return _plant_path(cluster, fault, one, other, factor, bad)
    if fault == "node path":
        other = int(rng.choice([i for i in range(nodes) if i != node]))
        mask = (cluster.node[:, None] == node) & (cluster.node[None, :] == other)
        mask = mask | mask.T
        cluster.rate[mask] *= factor
        names = cluster.names if len(cluster.names) == nodes else cluster.hosts
        return "path", (_ends(names[node], names[other], "<->"),), int(mask.sum())
    if fault == "several gpus":
        chosen = rng.choice(size, size=2, replace=False)
        for gpu in chosen:
            cluster.rate[(at[:, None] == gpu) | (at[None, :] == gpu)] *= factor
        return "several", tuple(cluster.names[gpu] for gpu in chosen), 2 * size
    if fault == "leaf":
        leaf = int(rng.integers(nodes // 4)) * 4
        inside = (cluster.node >= leaf) & (cluster.node < leaf + 4)
        mask = between & (inside[:, None] | inside[None, :])
        cluster.rate[mask] *= factor
        return "several", tuple(cluster.hosts[leaf : leaf + 4]), int(mask.sum()) // 4
    assert fault == "mixed"
    elsewhere = int(rng.choice(at[cluster.node != node]))
    cluster.rate[of_node & between] *= factor
    cluster.status[(at[:, None] == elsewhere) | (at[None, :] == elsewhere)] = bad
    return "several", (host, cluster.names[elsewhere]), int((of_node & between).sum())


def _plant_path(
    cluster: Cluster, fault: str, one: int, other: int, factor: float, bad: str
) -> tuple[str, tuple[str, ...], int | None]:
    ends = [(one, other)] if fault == "path one way" else [(one, other), (other, one)]
    sign = "->" if fault == "path one way" else "<->"
    for end in ends:
        if fault == "path fails":
            cluster.status[end] = bad
        elif fault == "path flaps":
            cluster.flaps[end] = True
        else:
            cluster.rate[end] *= factor
    seen = None if fault in ("path fails", "path flaps") else len(ends)
    return "path", (_ends(cluster.names[one], cluster.names[other], sign),), seen


def _ends(one: str, other: str, sign: str) -> str:
    one, other = (one, other) if sign == "->" else sorted((one, other))
    return f"{one} {sign} {other}"


def _shared(cluster: Cluster) -> bool:
    return len(cluster.hosts) > 1 and cluster.labels[0] == cluster.labels[1]


def right(case: Case, kind: str, culprits: tuple[str, ...]) -> bool:
    """Whether a verdict is the planted one: kind and all culprits, in any order."""
    return kind == case.kind and {_plain(name) for name in culprits} == {_plain(name) for name in case.culprits}


def _plain(name: str) -> str:
    one, sign, other = name.partition(" <-> ")
    return _ends(one, other, "<->") if sign else name
