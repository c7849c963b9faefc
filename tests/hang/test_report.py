"""The report: under 60 lines at any size, the JSON of the contract, files and looks that are compared."""

from __future__ import annotations

import copy
import json
import stat
from pathlib import Path

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang import Evidence, SpyReport, Verdict, load_evidence, merge_evidence, save_evidence, spy
from mldebug.hang._evidence import ALL_LOCALS
from mldebug.hang._verdict import KINDS

EVIDENCE = Path(__file__).parent / "evidence"


def load(name: str) -> Evidence:
    return load_evidence([EVIDENCE / f"{name}.json"])


def many(name: str, count: int, spread: bool = False) -> Evidence:
    """A recorded job of four ranks as one of `count`: ranks 4 and up do what rank 0 does, or all different things."""
    evidence = load(name)
    for number in range(4, count):
        rank = copy.deepcopy(evidence["ranks"][0])
        rank.update(rank=number, pid=100_000 + number, host=f"node{number // 8}")
        if spread:
            for sample in rank["samples"]:
                sample["threads"][0]["frames"][-1]["line"] = number
        evidence["ranks"].append(rank)
    for rank in evidence["ranks"]:
        rank["world_size"] = count
    return evidence


@pytest.mark.parametrize("name", [path.stem for path in sorted(EVIDENCE.glob("*.json"))])
def test_text_fits(name: str) -> None:
    lines = spy(load(name)).text().splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(("hung", "not hung"))


@pytest.mark.parametrize("spread", [False, True])
def test_text_stays_short_with_a_thousand_ranks_in_trouble(spread: bool) -> None:
    evidence = many("dataloader_fork_lock", 1000, spread)
    for number, rank in enumerate(evidence["ranks"]):
        rank["children"] = copy.deepcopy(evidence["ranks"][1]["children"])
        if number % 3 == 2:
            rank.update(status="no-permission", why=f"run as uid {number}", samples=[])
    evidence["hosts"] += [{"host": f"node{n}", "status": "timeout", "why": f"no answer ({n})"} for n in range(300)]
    evidence["notes"] = [f"a note of some length, number {n}, " + "with many words " * 20 for n in range(50)]
    lines = spy(evidence).text().splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 80


def test_text_has_the_merged_tree_with_the_outlier_first() -> None:
    text = spy(many("rank0_save_checkpoint", 64)).text()
    rows = text.splitlines()
    first = next(index for index, row in enumerate(rows) if "[0,4-63] main" in row or "[0] main" in row)
    second = next(index for index, row in enumerate(rows) if "[1-3] main" in row or "[1-63] main" in row)
    assert first > 0 and second > 0
    assert "64 ranks on" in text


def test_json_is_that_of_the_contract() -> None:
    document = json.loads(spy(load("rank0_save_checkpoint")).json())
    assert document["schema"] == 1 and document["ok"] is False
    verdict = document["verdict"]
    assert (verdict["hung"], verdict["kind"], verdict["culprits"]) == (True, "rank-guarded-collective", [0])
    assert verdict["text"] and verdict["sure"] == "high" and verdict["rests_on"]
    assert verdict["where"][0]["ranks"] == "0" and verdict["where"][0]["function"] == "save_checkpoint"
    assert {"file", "line", "function", "thread"} <= verdict["where"][0].keys()
    assert [(rank["rank"], rank["status"]) for rank in document["ranks"]] == [(n, "ok") for n in range(4)]


def test_evidence_survives_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.touch(mode=0o644)
    save_evidence(load("p2p_ring"), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert spy(load_evidence([path])).verdict == spy(load("p2p_ring")).verdict


def test_evidence_of_two_nodes_is_one_job() -> None:
    whole = load("sigstop_rank")
    first: Evidence = {**whole, "ranks": whole["ranks"][2:]}
    second: Evidence = {**whole, "ranks": whole["ranks"][:2], "hosts": [{"host": "b", "status": "ok"}]}
    merged = merge_evidence([first, second])
    assert [rank["rank"] for rank in merged["ranks"]] == [0, 1, 2, 3]
    assert len(merged["hosts"]) == 2
    assert spy(merged).verdict.culprits == (1,)


def test_stacks_for_other_viewers(tmp_path: Path) -> None:
    folded, scope = tmp_path / "job.folded", tmp_path / "job.speedscope.json"
    save_evidence(load("p2p_ring"), folded)
    save_evidence(load("p2p_ring"), scope)
    line = next(row for row in folded.read_text().splitlines() if row.startswith("rank 0 MainThread;"))
    assert "exchange (/job/p2p_ring.py:13)" in line and line.endswith(" 2")
    document = json.loads(scope.read_text())
    assert {profile["name"] for profile in document["profiles"]} == {f"rank {n} MainThread" for n in range(4)}
    frames = len(document["shared"]["frames"])
    assert all(index < frames for one in document["profiles"] for row in one["samples"] for index in row)


def test_diff_says_who_moved() -> None:
    now = load("skip_collective")
    before = copy.deepcopy(now)
    before["time"] -= 60
    before["ranks"] = before["ranks"][:3]
    for sample in before["ranks"][1]["samples"]:
        sample["threads"][0]["frames"][0]["line"] -= 1
        sample["threads"][0]["frames"] = sample["threads"][0]["frames"][2:]
    report = spy(now, earlier=before)
    assert report.since.startswith("since the earlier look, 60 s before:")
    assert "rank 1 moved" in report.since and "ranks 0,2 did not move" in report.since
    assert "rank 3 not seen then" in report.since
    assert "rank 1 moved" in report.text() and "since" in report.to_dict()


@pytest.mark.parametrize("content", ["nonsense", "[]", '{"schema": 99, "ranks": []}', None])
def test_a_file_that_is_no_evidence(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "job.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError):
        load_evidence([path])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MldebugError, match="cannot write"):
        save_evidence(load("p2p_ring"), tmp_path / "no" / "job.json")


def test_ranks_without_permission_are_shown_with_the_remedy() -> None:
    evidence = load("p2p_ring")
    evidence["ranks"][2].update(status="no-permission", why="run it as root", samples=[])
    text = spy(evidence).text()
    assert "2: no-permission: run it as root" in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_hang_says_what_to_do(kind: str) -> None:
    hung, slow = Verdict(True, kind), Verdict(False, kind)
    assert bool(hung.hint) == (kind not in ("unknown", "straggler"))
    assert slow.hint == ""
    text = SpyReport(hung, load("p2p_ring")).text()
    assert ("\nhint: " in text) == bool(hung.hint)
    assert max(map(len, text.splitlines())) <= 80


def test_all_locals_are_shown_where_the_culprits_stand_with_a_warning() -> None:
    evidence = load("skip_collective")
    assert "local variables" not in spy(evidence).text()
    samples = next(one for one in evidence["ranks"] if one["rank"] == 2)["samples"]
    for frame in (frame for sample in samples for frame in sample["threads"][0]["frames"]):
        frame["locals"] = [{"name": f"secret{n}", "repr": "x" * 200, "arg": False} for n in range(30)]
    evidence["notes"].append(ALL_LOCALS)
    text = spy(evidence).text()
    assert "rank 2 at skip_collective.py:" in text
    assert "    secret0 = xxx" in text and "they may hold private data" in " ".join(text.split())
    assert len(text.splitlines()) < 60 and max(map(len, text.splitlines())) <= 80
