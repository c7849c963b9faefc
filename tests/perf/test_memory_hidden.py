"""Containers that Python's collector does not know are found, and looking for their names keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

pytest.importorskip("torch")

from mldebug.perf.memory._holders import name_of
from mldebug.perf.memory._process import Process

pytestmark = pytest.mark.usefixtures("small_heap")


class Thing:
    """What can be referred to weakly."""


@pytest.mark.parametrize("where", ["local", "attribute"])
def test_a_dict_of_plain_values_that_grows(where: str) -> None:
    cache: dict[int, bytes] = {}
    thing: Any = Thing()
    if where == "attribute":
        thing.cache, cache = cache, {}
    now = [0]
    process = Process(lambda: now[0])
    for step in range(1, 151):
        now[0] += 1 << 20
        (thing.cache if where == "attribute" else cache)[step] = bytes(1 << 20)
        process.ended(step)
    process.judge()
    leak = process.leak
    assert leak is not None and leak.kind == "dict" and leak.item == "bytes"
    assert leak.name == ("`Thing.cache`" if where == "attribute" else f"`cache` in {_here()}()")


def test_names_are_looked_up_and_nothing_stays_for_it() -> None:
    kept: list[int] = [1, 2, 3]
    thing: Any = Thing()
    dies = weakref.ref(thing)
    assert name_of(kept) == f"`kept` in {test_names_are_looked_up_and_nothing_stays_for_it.__name__}()"
    thing = None
    gc.collect()
    assert dies() is None


def test_what_the_program_took_by_locals_is_left_alone() -> None:
    kept = [1, 2, 3]
    mine = locals()
    name_of(kept)
    assert mine["kept"] is kept


def _here() -> str:
    return test_a_dict_of_plain_values_that_grows.__name__
