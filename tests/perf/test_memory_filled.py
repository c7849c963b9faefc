"""What was found while a cache filled is not said any more once it is full."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch

from mldebug.perf.memory._holders import find_holder, length_of
from mldebug.perf.memory._process import Process

pytestmark = pytest.mark.usefixtures("small_heap")


def test_growth_that_has_ended_is_taken_back() -> None:
    now = [0]
    process = Process(lambda: now[0])
    for step in range(1, 231):
        now[0] += 2 << 20 if step <= 60 else 64
        process.ended(step)
        if step == 82:  # the steps are judged several times
            process.judge()
            assert process.per_step is not None and "the process grew" in process.note
    process.judge()
    assert process.per_step is None and not process.note


def test_an_lru_cache_is_a_holder_with_a_bound() -> None:
    keep = functools.lru_cache(maxsize=16)(lambda number: torch.full((4, 3), float(number)))
    for number in range(10):
        keep(number)
    found = find_holder(lambda tensor: tensor.shape == (4, 3))
    assert found is not None
    holder, address, tensor = found
    assert (holder.kind, holder.count, holder.most, holder.may_be_cache) == ("lru_cache", 10, 16, False)
    assert length_of(address, holder.kind) == 10 and tensor.shape == (4, 3)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict, lambda: collections.defaultdict(list)])
def test_what_has_keys_may_be_a_cache_that_still_fills(make: Callable[[], dict[int, object]]) -> None:
    kept = make()
    for number in range(10):
        kept[number] = torch.zeros(5, 7)
    found = find_holder(lambda tensor: tensor.shape == (5, 7))
    assert found is not None and found[0].may_be_cache and found[0].count == 10


def test_what_has_no_keys_is_none() -> None:
    kept = [torch.zeros(7, 5) for _ in range(10)]
    found = find_holder(lambda tensor: tensor.shape == (7, 5))
    assert found is not None and not found[0].may_be_cache and found[0].count == len(kept)
