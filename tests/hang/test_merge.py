"""The merged tree: rank sets, order, and its cost at 10,000 ranks."""

from __future__ import annotations

import time

from mldebug.hang._judge_case import name_ranks, ranges
from mldebug.hang._merge import chains, merge_stacks


def test_rank_sets_of_a_tree() -> None:
    tree = merge_stacks([(rank, ("main", "save" if rank == 7 else "step", "wait")) for rank in range(16)])
    main = tree.children["main"]
    assert (tree.label, main.children["step"].label, main.children["save"].label) == ("[0-15]", "[0-6,8-15]", "[7]")


def test_rows_have_outliers_first_and_runs_in_one_row() -> None:
    tree = merge_stacks([(rank, ("main", "save" if rank == 7 else "step", "wait")) for rank in range(16)])
    rows = [(depth, node.label, run) for depth, node, run in chains(tree)]
    assert rows == [(0, "[0-15]", ["main"]), (1, "[7]", ["save", "wait"]), (1, "[0-6,8-15]", ["step", "wait"])]


def test_a_stack_that_ends_where_others_go_on() -> None:
    rows = chains(merge_stacks([(0, ("a", "b")), (1, ("a",))]))
    assert [(depth, node.label, run) for depth, node, run in rows] == [(0, "[0-1]", ["a"]), (1, "[0]", ["b"])]


def test_nothing_to_merge() -> None:
    assert chains(merge_stacks([])) == []


def test_ranges_as_people_write_them() -> None:
    assert ranges([3, 1, 2, 8, 9, 5, 5]) == "1-3,5,8-9"
    assert name_ranks([4]) == "rank 4"
    assert name_ranks(range(0, 100, 2)) == "ranks 0,2,4,6,8,10,... (50 ranks)"


def test_ten_thousand_ranks_of_forty_frames_take_a_fifth_of_a_second() -> None:
    stacks = [
        (rank, [("train.py", f"f{depth if depth < 30 or rank % 97 else rank % 7}", depth) for depth in range(40)])
        for rank in range(10_000)
    ]
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        rows = chains(merge_stacks(stacks))
        assert [node.label for _depth, node, _run in rows]
        best = min(best, time.perf_counter() - start)
    assert best <= 0.2
