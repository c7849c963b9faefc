"""Rules that recorded jobs alone do not reach: nodes nobody saw, ranks that have left, threads that work, records."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mldebug.hang import Evidence, judge

EVIDENCE = Path(__file__).parent / "evidence"
RECORDED = [path.stem for path in sorted(EVIDENCE.glob("*.json")) if '"record":' in path.read_text()]


def load(name: str) -> Evidence:
    evidence: Evidence = json.loads((EVIDENCE / f"{name}.json").read_text())
    return evidence


def frame(name: str, file: str = "/job/train.py", line: int = 1, **ints: int) -> Any:
    found = {"name": name, "file": file, "line": line}
    if ints:
        found["locals"] = [{"name": key, "repr": str(value), "arg": False} for key, value in ints.items()]
    return found


@pytest.mark.parametrize("name", RECORDED)
def test_without_the_record_spy_says_less_and_never_otherwise(name: str) -> None:
    evidence = load(name)
    told = judge(evidence)
    for rank in evidence["ranks"]:
        rank.pop("record", None)
        rank.pop("progress", None)
    bare = judge(evidence)
    assert bare.hung == told.hung, bare.text
    assert bare.kind in (told.kind, "unknown"), bare.text
    assert set(bare.culprits) <= set(told.culprits), bare.text


def test_no_stack_at_all_is_no_hang_and_has_the_remedy() -> None:
    evidence = load("skip_collective")
    for rank in evidence["ranks"]:
        rank.update(status="no-permission", why="ptrace is not permitted: run as root", samples=[])
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind) == (False, "unknown")
    assert "run as root" in verdict.text


def test_ranks_of_nodes_that_nobody_looked_at_are_not_absent() -> None:
    evidence = load("skip_collective")
    for rank in evidence["ranks"]:
        rank.update(world_size=8, local_world_size=4)
    assert judge(evidence).kind == "skipped-collective"
    for rank in evidence["ranks"]:
        rank["samples"] = copy.deepcopy(evidence["ranks"][0]["samples"])
        for sample in rank["samples"]:
            for one in sample["threads"][0]["frames"]:
                one.pop("locals", None)
    verdict = judge(evidence)
    assert (verdict.hung, verdict.culprits) == (False, ())
    assert "4-7" in verdict.text


def test_a_node_that_is_silent_may_have_the_absent_ranks() -> None:
    evidence = load("init_missing_rank")
    evidence["hosts"] += [{"host": f"n{n}", "status": "timeout", "why": "no answer in 10 s"} for n in range(300)]
    for rank in evidence["ranks"]:
        rank.update(world_size=3000, local_world_size=4)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.sure) == ("missing-rank", "low")
    assert len(verdict.text) < 800


def test_who_has_left_passed_by_what_the_rest_is_guarded_by() -> None:
    evidence = load("rank0_save_checkpoint")
    del evidence["ranks"][1:]
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("rank-guarded-collective", (0,)), verdict.text


def test_who_has_left_without_a_reason_is_missing() -> None:
    evidence = load("skip_collective")
    evidence["ranks"] = [rank for rank in evidence["ranks"] if rank["rank"] != 2]
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("missing-rank", (2,)), verdict.text


@pytest.mark.parametrize("beats", [None, [7, 12]])
def test_a_thread_that_the_main_thread_waits_for_may_compute(beats: list[int] | None) -> None:
    evidence = load("gil_hog_regex")
    rank = evidence["ranks"][1]
    for sample in rank["samples"]:
        for thread in sample["threads"]:
            if thread["name"] == "MainThread":
                thread["frames"] = [frame("join", "/usr/lib/python3.11/threading.py"), frame("main", line=9)]
                thread["active"] = False
    if beats:
        rank["progress"] = {"heartbeat": beats}
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind) == (False, "straggler"), verdict.text


def test_a_heartbeat_that_moves_says_that_the_gil_is_free() -> None:
    evidence = load("gil_hog_regex")
    evidence["ranks"][1]["progress"] = {"heartbeat": [7, 7]}
    assert judge(evidence).kind == "gil-held"
    evidence["ranks"][1]["progress"] = {"heartbeat": [7, 12]}
    assert not judge(evidence).hung


def test_a_loop_that_counts_to_a_number_gets_on() -> None:
    evidence = load("poll_loop")
    rank = evidence["ranks"][3]
    for value, sample in enumerate(rank["samples"]):
        users = [one for one in sample["threads"][0]["frames"] if one["file"].startswith("/job/")]
        users[0]["locals"] = [{"name": "got", "repr": str(value), "arg": False}]
    for source in evidence["source"].values():
        source["guards"] = [guard.replace("not os.path.exists(path)", "got < 300") for guard in source["guards"]]
        for step in source["steps"]:
            step["guards"] = [guard.replace("not os.path.exists(path)", "got < 300") for guard in step["guards"]]
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind) == (False, "straggler"), verdict.text


def test_a_download_that_goes_on_is_slow() -> None:
    evidence = load("poll_loop")
    rank = evidence["ranks"][3]
    for turn, sample in enumerate(rank["samples"]):
        sample["threads"][0]["frames"] = [frame("recv_into", "/usr/lib/python3.11/socket.py"), frame("fetch", line=5)]
        sample["woke"] = [10 * turn, 10 * turn]
    assert not judge(evidence).hung
    for sample in rank["samples"]:
        sample["woke"] = [10, 10]
    assert judge(evidence).hung


def recorded(kinds: dict[int, list[tuple[str, int]]], done: bool = True) -> Evidence:
    """A job in which all ranks stand at one line, with records of (operation, line) by rank."""
    evidence = load("skip_collective")
    model = copy.deepcopy(evidence["ranks"][0]["samples"])
    for rank in evidence["ranks"]:
        rank["samples"] = copy.deepcopy(model)
        rows = kinds[rank["rank"] if rank["rank"] is not None else -1]
        rank["record"] = {
            "whole": True,
            "calls": [
                {
                    "group": "0",
                    "seq": seq,
                    "op": op,
                    "done": done or seq < len(rows),
                    "frames": [frame("main", line=at)],
                }
                for seq, (op, at) in enumerate(rows, 1)
            ],
        }
    return evidence


def test_a_call_too_many_is_found_where_it_was_made() -> None:
    from mldebug.hang._judge_case import Case
    from mldebug.hang._judge_record import parting

    usual = [("all_reduce", 7)] * 5 + [("barrier", 9)]
    extra = [("all_reduce", 7)] * 2 + [("all_reduce", 8)] + [("all_reduce", 7)] * 3
    found = parting(Case.of(recorded({0: usual, 1: extra, 2: usual, 3: usual})))
    assert found is not None
    assert (found.seq, found.odd) == (3, (1,))


def test_a_call_that_all_issued_and_that_does_not_end_is_the_network() -> None:
    ahead = [("broadcast", 5), ("all_reduce", 6), ("broadcast", 5), ("all_reduce", 6)]
    evidence = recorded({0: ahead, 1: ahead[:3], 2: ahead[:3], 3: ahead[:3]}, done=False)
    for rank in evidence["ranks"]:
        if rank["rank"] == 0:
            rank["samples"] = copy.deepcopy(load("skip_collective")["ranks"][2]["samples"])
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("network", ()), verdict.text
    assert "call 3" in verdict.text


@pytest.mark.parametrize(
    ("name", "thread", "function"),
    [("gil_hog_regex", "clean-text", "clean"), ("exception_one_rank", "metrics", "metrics_loop")],
)
def test_where_names_the_thread_that_the_verdict_is_about(name: str, thread: str, function: str) -> None:
    (row,) = [row for row in judge(load(name)).where if row["culprit"]]
    assert (row["thread"], row["function"]) == (thread, function)


def test_who_waits_for_others_and_wakes_up_often_gets_on() -> None:
    evidence = load("skip_collective")
    for turn in (0, 1):
        evidence["ranks"][0]["samples"][turn]["woke"] = [5 + 40 * turn, 8 + 40 * turn]
    assert not judge(evidence).hung
    for turn in (0, 1):
        evidence["ranks"][0]["samples"][turn]["woke"] = [5 + 3 * turn, 8 + 3 * turn]
    assert judge(evidence).hung


def test_the_loop_that_was_left_is_the_outer_one() -> None:
    verdict = judge(load("early_stop_ddp"))
    assert "for epoch in range(10)" in verdict.text
    assert "`if patience >= 2`" in verdict.text


def test_children_that_come_and_go_are_at_work() -> None:
    evidence = load("pipe_deadlock")
    child = evidence["ranks"][1]["children"][0]
    assert judge(evidence).kind == "pipe-deadlock"
    child.update(kind="other", command="as --64 -o x.o x.s", state="R", samples=child["samples"][:1])
    child["samples"][0].update(threads=[], state="R", wchan="0")
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind) == (False, "straggler"), verdict.text


def test_a_rank_that_is_gone_comes_before_those_that_try_again() -> None:
    evidence = load("skip_collective")
    evidence["ranks"] = [rank for rank in evidence["ranks"] if rank["rank"] != 2]
    for sample in evidence["ranks"][0]["samples"]:
        sample["threads"][0]["frames"] = [frame("main", line=17)]
    evidence["source"]["/job/train.py:17"] = {"text": "time.sleep(100000)", "guards": [], "steps": []}
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("missing-rank", (2,)), verdict.text
    evidence["source"]["/job/train.py:17"]["text"] = "time.sleep(5)"
    assert not judge(evidence).hung


def test_a_native_thread_that_spins_is_no_progress() -> None:
    evidence = load("skip_collective")
    for turn, sample in enumerate(evidence["ranks"][0]["samples"]):
        sample["ticks"] = 100 + 90 * turn
        sample["threads"][0]["ticks"] = 50
    assert judge(evidence).culprits == (2,)
    evidence["ranks"][0]["samples"][-1]["threads"][0]["ticks"] = 140
    assert not judge(evidence).hung
