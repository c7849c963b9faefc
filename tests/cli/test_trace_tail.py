"""`mldebug trace-tail`: exit status, JSON, files, and wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mldebug.cli import _trace_tail
from mldebug.core.errors import MldebugError, UsageError
from tests.tracing.jobs import line, loop, write_trace


def run(*words: str | Path) -> int:
    parser = _trace_tail.PARSER(prog="mldebug trace-tail", epilog=_trace_tail.EPILOG)
    _trace_tail.add_arguments(parser)
    args: argparse.Namespace = parser.parse_args([str(word) for word in words])
    return _trace_tail.run(args)


def _step(step: int) -> list[str]:
    return [line(4, "loss = model(batch)"), line(5, "optimizer.step()")]


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    folder = tmp_path / "healthy"
    folder.mkdir()
    for rank in range(4):
        write_trace(folder, rank, loop(20, _step), ended=True)
    return folder


@pytest.fixture
def parted(tmp_path: Path) -> Path:
    folder = tmp_path / "parted"
    folder.mkdir()
    for rank in range(4):
        steps = loop(20, _step) + ([line(9, "break")] if rank == 2 else [])
        write_trace(folder, rank, [*steps, *loop(20, _step)], seconds=3 if rank == 2 else 20)
    return folder


def test_status_is_0_for_a_healthy_job_and_1_for_trouble(
    healthy: Path, parted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(healthy, "--jobs", "1") == 0
    assert "no rank went another way" in capsys.readouterr().out
    assert run(parted) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("rank 2 stopped first") and "rank 2 -> train.py:     9: break" in out
    assert max(map(len, out.splitlines())) <= 80


def test_quiet_prints_nothing_unless_there_is_trouble(
    healthy: Path, parted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(healthy, "-q")
    assert capsys.readouterr().out == ""
    run(parted, "-q")
    assert "stopped first" in capsys.readouterr().out


def test_json_and_output_are_the_same_document(
    parted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parted, "--json", "-o", tmp_path / "out.json", "--pattern", "step", "--lines", "2") == 1
    shown = capsys.readouterr().out
    assert (tmp_path / "out.json").read_text() == shown
    found = json.loads(shown)
    assert found["schema"] == 1 and found["ok"] is False and found["missing"] == ""
    assert found["partings"][0]["ways"][0] == {"ranks": "2", "line": "train.py:     9: break"}
    assert found["partings"][0]["iteration"] == 19
    assert [rank["matches"] for rank in found["ranks"]] == [80, 80, 80, 80]
    assert all(len(rank["lines"]) == 2 for rank in found["ranks"])


def test_files_may_be_named_one_by_one(parted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(parted.iterdir())
    assert run(*files[:2], "--no-compare") == 1
    assert "2 of 4 ranks; no trace of rank 2-3" in capsys.readouterr().out


def test_wrong_usage_is_two_lines(tmp_path: Path, healthy: Path) -> None:
    for words, message in (
        ((tmp_path / "nothing",), "there is no file or folder"),
        ((tmp_path,), "no trace in"),
        ((healthy, "--pattern", "("), "is no regular expression"),
        ((healthy, "--lines", "0"), "--lines"),
        ((healthy, "-o", tmp_path / "no" / "file"), "there is no folder"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            run(*words)
        assert len(str(caught.value).splitlines()) == 2 and isinstance(caught.value, MldebugError)


def test_several_processes_find_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mldebug.tracing._tail_pool._WORTH", 0)
    for rank in range(4):
        write_trace(tmp_path, rank, loop(20_000, _step) + ([line(9, "break")] if rank == 3 else []))
    texts = []
    for jobs in ("1", "3"):
        run(tmp_path, "--jobs", jobs, "--pattern", "model")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and "20,001  rank 0-3" in texts[0]


def test_ctrl_c_ends_with_what_is_known(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(tmp_path, rank, [*loop(20, _step), line(9, "x" * 60)], seconds=4 if rank == 1 else 3000)
    program = (  # a pattern that takes for ever
        "from mldebug.tracing import _tail_pool; _tail_pool._WORTH = 0; "
        "import sys; from tests.cli.test_trace_tail import run; print('ready', flush=True); "
        "sys.exit(run(sys.argv[1], '--pattern', '(x+x+)+y', '--jobs', '2'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.fspath(Path(__file__).parents[2])},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: children too
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "rank 1 stopped first" in out and "interrupted" in out and "Traceback" not in err
