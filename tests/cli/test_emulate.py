"""`mldebug emulate` as a command: its options, its status, its words. The nodes are tested in tests/ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def mldebug(run_python: Run, *words: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "mldebug", "emulate", *words, **more)


def test_output_status_and_what_is_said(run_python: Run) -> None:
    done = mldebug(run_python, "--plain", "--nodes", "2", "--", "bash", "-c", "echo {node} of {nodes}")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[node0] 0 of 2", "[node1] 1 of 2"]
    assert done.stderr.startswith("mldebug: 2 nodes, plain processes: as --plain asks; ")
    first, *more = done.stderr.splitlines()
    assert max(map(len, (first, *more))) <= 80
    assert all(line.startswith("    ") for line in more)  # one note, and nothing else
    done = mldebug(run_python, "-q", "--plain", "--no-prefix", "--", "bash", "-c", "exit {node}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("2 nodes, ")


def test_json_and_output(run_python: Run, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    done = mldebug(run_python, "--plain", "--json", "-o", output, "--", "bash", "-c", "echo hi; exit 3")
    document = json.loads(done.stdout)
    assert done.stdout == output.read_text()
    assert (done.returncode, document["status"], document["namespaces"]) == (3, 3, False)
    assert "[node0] hi\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command to run"),
        (["--", "no-such-program"], "cannot run no-such-program"),
        (["--", "env", "torchrun", "--standalone", "train.py"], "leave --standalone out"),
        (["--nodes", "0", "--", "true"], "--nodes"),
        (["--nodes", "500", "--", "true"], "nodes is 500"),
        (["--grace", "soon", "--", "true"], "--grace"),
    ],
)
def test_errors_are_two_lines(run_python: Run, words: list[str], said: str) -> None:
    done = mldebug(run_python, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 2
