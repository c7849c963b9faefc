"""Rounds of pairs: every pair once, none twice in a round, and as few rounds as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from mldebug.cluster.pairs._schedule import Round, gpu_rounds, node_rounds, sample_rounds
from mldebug.core.errors import UsageError


def places(gpus_of: Sequence[int]) -> list[tuple[int, int]]:
    return [(node, gpu) for node, size in enumerate(gpus_of) for gpu in range(size)]


def check_disjoint(rounds: list[Round]) -> None:
    for turn in rounds:
        busy = [place for pair in turn for place in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("nodes", range(1, 8))
@pytest.mark.parametrize("gpus", range(1, 9))
def test_every_pair_once_in_the_fewest_rounds(nodes: int, gpus: int) -> None:
    rounds = gpu_rounds([gpus] * nodes)
    check_disjoint(rounds)
    pairs = [frozenset(pair) for turn in rounds for pair in turn]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {frozenset(pair) for pair in itertools.combinations(places([gpus] * nodes), 2)}
    between = 0 if nodes == 1 else (nodes - 1 if nodes % 2 == 0 else nodes) * gpus
    within = 0 if gpus == 1 else gpus - 1 if gpus % 2 == 0 else gpus
    assert len(rounds) == between + within


@pytest.mark.parametrize("gpus_of", [[8, 4], [1, 8, 3], [2, 2, 1, 5], [1, 1, 7], [3]])
def test_nodes_of_unequal_size(gpus_of: list[int]) -> None:
    rounds = gpu_rounds(gpus_of)
    check_disjoint(rounds)
    pairs = [frozenset(pair) for turn in rounds for pair in turn]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, map(frozenset, itertools.combinations(places(gpus_of), 2))))


@pytest.mark.parametrize("nodes", [1, 2, 3, 6, 9])
def test_nodes_only(nodes: int) -> None:
    rounds = node_rounds(nodes)
    assert sorted(pair for turn in rounds for pair in turn) == list(itertools.combinations(range(nodes), 2))
    assert all(len({node for pair in turn for node in pair}) == 2 * len(turn) for turn in rounds)


@pytest.mark.parametrize("gpus_of", [[8] * 128, [8] * 7, [4, 4], [1] * 12, [1, 1], [8, 6, 8, 2, 8], [4] * 3, [3]])
@pytest.mark.parametrize("seed", range(4))
def test_sample_is_small_and_reaches_every_gpu(gpus_of: list[int], seed: int) -> None:
    rounds = sample_rounds(gpus_of, seed)
    check_disjoint(rounds)
    pairs = [frozenset(pair) for turn in rounds for pair in turn]
    assert len(pairs) == len(set(pairs))
    assert all(len(pair) == 2 for pair in pairs)
    assert len(rounds) <= max(gpus_of) + 6
    within = {pair for pair in pairs if len({node for node, _ in pair}) == 1}
    assert len(within) == sum(size * (size - 1) // 2 for size in gpus_of)
    if len(gpus_of) > 1 and len(set(gpus_of)) == 1:
        between = [pair for pair in pairs if pair not in within]
        assert {place for pair in between for place in pair} == set(places(gpus_of))
        if gpus_of[0] > 1:
            assert any(len({gpu for _, gpu in pair}) == 2 for pair in between)


def test_sample_differs_with_its_seed() -> None:
    assert sample_rounds([8] * 32, 1) == sample_rounds([8] * 32, 1)
    assert len({str(sample_rounds([8] * 32, seed)) for seed in range(8)}) > 1


@pytest.mark.parametrize("gpus_of", [[], [4, 0]])
def test_no_gpu_is_wrong_usage(gpus_of: list[int]) -> None:
    with pytest.raises(UsageError, match="0 GPUs"):
        gpu_rounds(gpus_of)
