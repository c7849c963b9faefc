"""Two switches whose members are noisy, and single measurements that stray."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from mldebug.cluster import judge_pairs
from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.cluster.pairs._halves import halved


def cluster(nodes: int, gpus: int, seed: int, noise: float, level: Callable[[int, int], float]) -> PairsEvidence:
    """`level(node, node)` is GBps between two nodes; 370 within one."""
    rng = random.Random(seed)
    names = [(node, gpu) for node in range(nodes) for gpu in range(gpus)]
    pairs = [(one, other) for one in range(len(names)) for other in range(len(names)) if one != other]
    rates = [
        (370.0 if names[a][0] == names[b][0] else level(names[a][0], names[b][0])) * math.exp(rng.gauss(0, noise))
        for a, b in pairs
    ]
    return {
        "schema": 1, "gpus": [f"n{node}:{gpu}" for node, gpu in names], "src": [a for a, _ in pairs],
        "dst": [b for _, b in pairs], "gbps": list(rates), "status": ["ok"] * len(pairs), "notes": [],
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("nodes", "gpus", "switches"), [(24, 2, 2), (32, 2, 2), (24, 1, 3), (16, 2, 4)])
def test_switches_are_no_fault_in_noise(nodes: int, gpus: int, switches: int, seed: int) -> None:
    each = nodes // switches
    verdict = judge_pairs(cluster(nodes, gpus, seed, 0.12, lambda a, b: 46 if a // each == b // each else 36))
    assert (verdict.kind, verdict.culprits) == ("none", ())


@pytest.mark.parametrize("seed", range(6))
def test_a_path_within_a_switch_that_is_as_slow_as_those_between_two(seed: int) -> None:
    def level(one: int, other: int) -> float:
        return 20 if {one, other} == {17, 22} or one // 16 != other // 16 else 46

    verdict = judge_pairs(cluster(32, 2, seed, 0.04, level))
    assert (verdict.kind, verdict.culprits) == ("path", ("n17 <-> n22",))


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_node_of_a_switch_is_named(seed: int) -> None:
    def level(one: int, other: int) -> float:
        return (46 if one // 12 == other // 12 else 34) * (0.5 if 5 in (one, other) else 1)

    verdict = judge_pairs(cluster(24, 2, seed, 0.1, level))
    assert (verdict.kind, verdict.culprits) == ("node", ("n5",))


@pytest.mark.parametrize("size", [6, 8, 16, 64])
def test_noise_alone_has_no_halves(size: int) -> None:
    for seed in range(30):
        noise = np.random.default_rng(seed).normal(0, 0.1, (size, size))
        mean = noise + noise.T
        np.fill_diagonal(mean, np.nan)
        assert not halved(mean).any()


@pytest.mark.parametrize("seed", range(6))
def test_measurements_that_stray_here_and_there_make_no_path_of_two_nodes(seed: int) -> None:
    evidence = cluster(8, 8, seed, 0.02, lambda a, b: 46)
    rng = random.Random(seed)
    evidence["gbps"] = [
        rate and rate * (rng.uniform(0.55, 0.8) if rng.random() < 0.01 else 1) for rate in evidence["gbps"]
    ]
    verdict = judge_pairs(evidence)
    assert not [name for name in verdict.culprits if ":" not in name]
