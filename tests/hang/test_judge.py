"""The verdict on recorded jobs: each file is what two looks at a real job of four ranks on gloo gave."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from mldebug.hang import Evidence, judge

EVIDENCE = Path(__file__).parent / "evidence"

PROGRAMS = Path(__file__).parent / "programs"

HUNG = {
    "cross_pg_order": ("cross-group-order", (3,)),
    "dataloader_fork_lock": ("fork-with-lock-held", (1,)),
    "exception_one_rank": ("dead-main-thread", (2,)),
    "filelock_barrier": ("lock-barrier-cycle", (0,)),
    "gil_hog_regex": ("gil-held", (1,)),
    "init_missing_rank": ("missing-rank", (2,)),
    "p2p_ring": ("p2p-cycle", ()),
    "rank0_save_checkpoint": ("rank-guarded-collective", (0,)),
    "same_line_other_step": ("iteration-skew", (2,)),
    "sigstop_rank": ("process-stopped", (1,)),
    "skip_collective": ("skipped-collective", (2,)),
    "uneven_batches_short": ("fewer-iterations", (3,)),
}
MOVING = ["slow_rank_control"]
# The others begin with what is right of them: `"""hung gil-held 1: ..."""`, `"""moving straggler -: ..."""`.
for _program in sorted(PROGRAMS.glob("*.py")):
    _head = re.match(r'"""(hung|moving) (\S+) ([\d,-]+): ', _program.read_text())
    if _head and (EVIDENCE / f"{_program.stem}.json").exists():
        if _head[1] == "moving":
            MOVING.append(_program.stem)
        else:
            HUNG[_program.stem] = _head[2], tuple(map(int, re.findall(r"\d+", _head[3])))


def load(name: str) -> Evidence:
    evidence: Evidence = json.loads((EVIDENCE / f"{name}.json").read_text())
    return evidence


@pytest.mark.parametrize("name", sorted(HUNG))
def test_kind_and_culprits_of_a_hung_job(name: str) -> None:
    verdict = judge(load(name))
    assert (verdict.hung, verdict.kind, verdict.culprits) == (True, *HUNG[name]), verdict.text


@pytest.mark.parametrize("name", MOVING)
def test_a_slow_job_is_no_hung_job(name: str) -> None:
    verdict = judge(load(name))
    assert (verdict.hung, verdict.kind, verdict.culprits) == (False, "straggler", ()), verdict.text


def test_every_recorded_job_is_judged() -> None:
    assert {path.stem for path in EVIDENCE.glob("*.json")} == {*HUNG, *MOVING}


@pytest.mark.parametrize("name", sorted(HUNG))
def test_judging_does_not_change_the_evidence(name: str) -> None:
    evidence = load(name)
    before = copy.deepcopy(evidence)
    judge(evidence)
    assert evidence == before


def test_all_at_one_place_and_nobody_moves_is_the_network() -> None:
    evidence = load("skip_collective")
    model = evidence["ranks"][0]
    for number, rank in enumerate(evidence["ranks"]):
        rank["samples"] = copy.deepcopy(model["samples"])
        for sample in rank["samples"]:
            for frame in sample["threads"][0]["frames"]:
                for local in frame.get("locals", []):
                    local["repr"] = str(number) if local["name"] == "rank" else local["repr"]
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind, verdict.culprits) == (True, "network", ())


def test_an_absent_rank_is_less_sure_while_a_node_is_silent() -> None:
    evidence = load("init_missing_rank")
    evidence["hosts"].append({"host": "node2", "status": "timeout", "why": "no answer in 10 s"})
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits, verdict.sure) == ("missing-rank", (2,), "medium")
    assert "node2 (no answer in 10 s)" in verdict.text


def test_counters_that_move_between_the_looks_say_slow() -> None:
    evidence = load("same_line_other_step")
    for rank in evidence["ranks"]:
        for frame in rank["samples"][0]["threads"][0]["frames"]:
            for local in frame.get("locals", []):
                local["repr"] = "1" if local["name"] == "step" else local["repr"]
    assert not judge(evidence).hung


def test_no_rank_is_no_hang() -> None:
    evidence: Evidence = {"schema": 1, "time": 0.0, "hosts": [], "ranks": [], "notes": []}
    verdict = judge(evidence)
    assert (verdict.hung, verdict.text) == (False, "No rank was found.")


def test_a_rank_without_a_stack_is_said() -> None:
    evidence = load("sigstop_rank")
    evidence["ranks"][3].update(status="no-permission", why="as root: sysctl kernel.yama.ptrace_scope=0", samples=[])
    verdict = judge(evidence)
    assert verdict.culprits == (1,)
    assert "No stack of rank 3" in verdict.text


def test_the_record_confirms_and_makes_sure() -> None:
    evidence = load("skip_collective")
    for rank in evidence["ranks"]:
        ops = ["all_reduce", "broadcast"] * 3 + ["all_reduce" if rank["rank"] != 2 else "broadcast"]
        calls = [{"group": "0", "seq": number, "op": op, "done": True} for number, op in enumerate(ops, 1)]
        rank["record"] = {"calls": calls, "whole": True}  # type: ignore[typeddict-item]
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits, verdict.sure) == ("skipped-collective", (2,), "high")
    assert verdict.rests_on[0] == "record of collectives"


def test_call_sites_that_a_program_pairs_by_itself_are_healthy_in_the_record() -> None:
    from mldebug.hang._judge_case import Case
    from mldebug.hang._judge_record import parting

    evidence = load("skip_collective")
    for rank in evidence["ranks"]:
        line = 10 if rank["rank"] == 0 else 12
        frame = {"name": "sync", "file": "/job/train.py", "line": line}
        calls = [{"group": "0", "seq": n, "op": "broadcast", "done": True, "frames": [frame]} for n in range(1, 9)]
        rank["record"] = {"calls": calls, "whole": True}  # type: ignore[typeddict-item]
    assert parting(Case.of(evidence)) is None


def test_a_rank_that_works_under_a_file_lock_is_slow() -> None:
    evidence = load("filelock_barrier")
    for ticks, sample in zip((100, 160), evidence["ranks"][0]["samples"], strict=True):
        thread = sample["threads"][0]
        thread["frames"] = [frame for frame in thread["frames"] if frame["file"].startswith("/job/")]
        thread["active"] = True
        sample["ticks"] = ticks
    verdict = judge(evidence)
    assert not verdict.hung, verdict.text
    evidence["ranks"][0]["samples"][0]["threads"][0]["active"] = False
    assert "file lock" in verdict.text


def test_polling_for_a_child_that_works_is_slow() -> None:
    evidence = load("poll_loop")
    child = copy.deepcopy(evidence["ranks"][3])
    for ticks, sample in zip((0, 50), child["samples"], strict=True):
        sample.update(ticks=ticks, threads=[])
    evidence["ranks"][3]["children"] = [
        {"pid": 9, "parent": 1, "command": "g++", "kind": "other", "state": "R", "samples": child["samples"]}
    ]
    verdict = judge(evidence)
    assert (verdict.hung, verdict.kind) == (False, "straggler"), verdict.text


def test_a_stopped_loader_worker_is_named() -> None:
    evidence = load("dataloader_worker")
    evidence["ranks"][3]["children"][0]["state"] = "T"
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("process-stopped", (3,))


def test_a_loader_worker_that_has_died_is_named() -> None:
    evidence = load("dataloader_worker")
    evidence["ranks"][3]["children"][0].update(state="Z", samples=[])
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("dataloader-worker", (3,))


def test_a_zombie_rank_is_missing() -> None:
    evidence = load("exception_one_rank")
    evidence["ranks"][2].update(state="Z", samples=[])
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("missing-rank", (2,))


def test_without_the_text_of_the_program_the_verdict_is_no_surer() -> None:
    order = ("low", "medium", "high")
    for name in ("cross_pg_order", "skip_collective", "rank0_save_checkpoint", "uneven_batches_short"):
        evidence = load(name)
        with_text = judge(evidence)
        evidence["source"] = {}
        without = judge(evidence)
        assert without.hung and without.culprits == with_text.culprits, name
        assert order.index(without.sure) <= order.index(with_text.sure), name


def test_ranks_without_a_number_take_that_of_the_program() -> None:
    evidence = load("same_line_other_step")
    for rank in evidence["ranks"]:
        rank["rank"] = rank["world_size"] = None
    verdict = judge(evidence)
    assert (verdict.kind, verdict.culprits) == ("iteration-skew", (2,))


def test_a_framework_at_two_places_of_its_own_is_no_network() -> None:
    evidence = load("skip_collective")
    model = copy.deepcopy(evidence["ranks"][0]["samples"])
    for rank in evidence["ranks"]:
        rank["samples"] = copy.deepcopy(model)
        line, name = (90, "validate") if rank["rank"] == 2 else (80, "train_epoch")
        for sample in rank["samples"]:
            loop = {"name": name, "file": "/venv/lib/python3.11/site-packages/frame/loop.py", "line": line + 100}
            fit = {"name": "fit", "file": "/venv/lib/python3.11/site-packages/frame/trainer.py", "line": line}
            sample["threads"][0]["frames"][2:2] = [loop, fit]  # type: ignore[list-item]
    verdict = judge(evidence)
    assert verdict.kind != "network"
    assert verdict.culprits == (2,), verdict.text
