"""`mldebug spy`: exit status, JSON, files, and wrong usage."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mldebug import hang
from mldebug.cli import _spy
from mldebug.core.errors import MldebugError, UsageError

EVIDENCE = Path(__file__).parent.parent / "hang" / "evidence"
HUNG, MOVING = EVIDENCE / "rank0_save_checkpoint.json", EVIDENCE / "slow_rank_control.json"


def parse(*words: str) -> argparse.Namespace:
    parser = _spy.PARSER(prog="mldebug spy", epilog=_spy.EPILOG)
    _spy.add_arguments(parser)
    parsed: argparse.Namespace = parser.parse_args(list(words))
    return parsed


def run(*words: str) -> int:
    return _spy.run(parse(*words))


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """collect() gives a recorded job, and keeps what it was asked for."""
    asked: list[dict[str, Any]] = []

    def collect(**options: Any) -> Any:
        asked.append(options)
        return json.loads(HUNG.read_text())

    monkeypatch.setattr(hang, "collect", collect, raising=False)
    return asked


def test_a_hung_job_is_status_1_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(HUNG)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hung: rank-guarded-collective, rank 0"
    assert len(lines) < 60


def test_a_slow_job_is_status_0_and_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(MOVING)) == 0
    assert capsys.readouterr().out.startswith("not hung: straggler")
    assert run("--from", str(MOVING), "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(HUNG), "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert document["verdict"]["culprits"] == [0]


def test_what_is_written_is_judged_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "copy.json"
    assert run("--from", str(HUNG), "-o", str(copied)) == 1
    first = capsys.readouterr().out
    assert run("--from", str(copied)) == 1
    assert capsys.readouterr().out == first


def test_files_of_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(HUNG.read_text())
    paths = []
    for index in (0, 1):
        part = copy.deepcopy(whole)
        part["ranks"] = part["ranks"][2 * index : 2 * index + 2]
        paths += ["--from", str(tmp_path / f"{index}.json")]
        Path(paths[-1]).write_text(json.dumps(part))
    assert run(*paths, "--json") == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["culprits"] == [0]


def test_diff_shows_who_moved(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(HUNG), "--diff", str(HUNG)) == 1
    assert "ranks 0-3 did not move" in " ".join(capsys.readouterr().out.split())


def test_options_go_to_collect(collected: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pid", "7", "--pid", "8", "--name", "train.py", "--user", "ada", "--samples", "3", "--interval", "0.1"]
    assert run(*words, "--native", "--locals", "--timeout", "5") == 1
    assert collected == [
        {
            "pids": (7, 8),
            "name": "train.py",
            "user": "ada",
            "samples": 3,
            "interval": 0.1,
            "native": True,
            "locals": True,
            "timeout": 5.0,
        }
    ]
    assert run() == 1
    assert collected[-1] == {}


def test_spy_writes_its_evidence_for_its_owner_only(collected: list[dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    assert run("-o", str(path), "-q") == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert collected


@pytest.mark.parametrize(
    "words",
    [
        ["--from", "nowhere.json"],
        ["--from", str(HUNG), "--pid", "3"],
        ["--pid", "0"],
        ["--pid", "x"],
        ["--timeout", "0"],
        ["--interval", "soon"],
        ["--diff", "nowhere.json", "--from", str(HUNG)],
        ["--from", str(HUNG), "-o", "no/such/folder/file.json"],
    ],
    ids=" ".join,
)
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        run(*words)
    assert isinstance(caught.value, MldebugError) and caught.value.hint


def test_where_no_node_answered_nothing_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = {**json.loads(MOVING.read_text()), "ranks": []}
    for statuses, status, words in (
        (("unreachable", "timeout"), 1, "no node answered\n"),
        (("unreachable", "ok"), 0, "not hung\n"),
    ):
        hosts = [{"host": f"node{number}", "status": said, "why": ""} for number, said in enumerate(statuses)]
        (tmp_path / "job.json").write_text(json.dumps({**evidence, "hosts": hosts}))
        assert run("--from", str(tmp_path / "job.json")) == status
        said = capsys.readouterr()
        assert said.out.startswith(words)
        assert said.err.startswith("hint: a rank is") == (status == 0)
