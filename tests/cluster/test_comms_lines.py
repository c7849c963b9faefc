"""What the report of comms looks like: tables of 80 columns, small figures, and who is to blame for silence."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mldebug.cluster._hub import Agent
from mldebug.cluster.collectives._coordinator import Rank, _unheard
from mldebug.cluster.collectives._report import judged
from mldebug.cluster.dist._wire import Wire


def cell(us: float, busbw: float) -> dict[str, Any]:
    return {
        "us": us, "algbw": busbw, "busbw": busbw, "min_us": us, "max_us": us, "by_rank": [us, us], "mode": "in turn",
        "iters": 20, "launches": 1, "calls": "nccl", "wrong": 0,
    }  # fmt: skip


def evidence(cells: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    rows = [
        {
            "collective": "reduce_scatter", "dtype": "bfloat16", "op": "sum", "root": -1, "bytes": 65544 << place,
            "count": 4, "chosen": {}, "out_of_place": first, "in_place": second,
        }
        for place, (first, second) in enumerate(cells)
    ]  # fmt: skip
    return {
        "schema": 1, "asked": {"min_busbw": 0.0}, "world": 2, "hosts": ["a"], "gpu": "cpu", "backend": "gloo",
        "torch": "2.11", "nccl": "", "ranks": [], "rows": rows, "objects": {}, "stability": {}, "notes": [],
        "ended": "finished", "why": "", "culprits": [], "seconds": 1.0,
    }  # fmt: skip


def test_a_table_with_both_places_is_80_columns_wide() -> None:
    sizes = [(cell(99999999, 0.0001234), cell(9.41, 9999.5)), (cell(17425, 0.0117), cell(249.37, 269.11))]
    lines = judged(evidence(sizes)).text().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "KiB" in line and "in turn" in line]
    assert len(rows) == 2 and {len(row) for row in rows} == {12}, "no two figures touch"


def test_a_slow_network_is_not_shown_as_0() -> None:
    text = judged(evidence([(cell(17425, 0.0117), cell(900000, 0.00012))])).text()
    assert " 0.012 " in text and " 0.00012 " in text and " 0.00 " not in text


def test_a_run_that_never_began_says_no_more_than_that() -> None:
    told = {**evidence([]), "world": 0, "backend": "", "ended": "start", "why": "h3: no rank could be started there"}
    assert judged(told).text().startswith("comms: ended early (start): h3: no rank could be started there; nothing was")
    assert "measured (1.0 s)" in " ".join(judged(told).text().split())


@pytest.mark.parametrize(
    ("silent", "blamed"), [((9.0, 0.2), [0, 1]), ((0.2, 9.0), [2, 3]), ((9.0, 9.0), None), ((0.2, 0.5), None)]
)
def test_a_host_is_to_blame_where_it_alone_is_silent(silent: tuple[float, float], blamed: list[int] | None) -> None:
    now = time.monotonic()
    agents = [Agent(cast(Wire, SimpleNamespace(heard=now - seconds))) for seconds in silent]
    late = [Rank(number, f"h{number // 2}", number % 2, agents[number // 2]) for number in range(4)]
    found = _unheard(late)
    assert ([rank.number for rank in found[0]] if found else None) == blamed
    assert not found or found[1].startswith(
        f"cannot be reached: nothing is heard of h{found[0][0].number // 2} for 9 s"
    )
