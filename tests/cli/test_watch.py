"""`mldebug watch` as a command: its files, its status, its words. What it sees is tested in tests/hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mldebug.hang import load_evidence

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
STOPPED = "import os, signal; os.environ['RANK'] = '0'; os.kill(os.getpid(), signal.SIGSTOP)"
AS_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}


def watch(run_python: Run, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "mldebug", "watch", *words, env=env)


def test_the_evidence_of_a_hang_is_kept_and_judged_alike(run_python: Run, tmp_path: Path) -> None:
    output = tmp_path / "evidence.json"
    options = ["--timeout", "1", "--on-hang", "spy,kill", "--json", "-o", str(output)]
    done = watch(run_python, *options, "--", "env", *(f"{name}={value}" for name, value in AS_RANK.items()),
                 sys.executable, "-c", STOPPED)  # fmt: skip
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]["kind"]) == (1, "process-stopped")
    assert load_evidence([output])["ranks"][0]["rank"] == 0
    assert output.stat().st_mode & 0o777 == 0o600
    again = run_python("-m", "mldebug", "spy", "--json", "--from", str(output))
    assert json.loads(again.stdout)["verdict"] == document["verdict"]


def test_the_report_for_people_says_how_it_ended(run_python: Run) -> None:
    options = ["--timeout", "1", "--on-hang", "spy,kill", "--"]
    done = watch(run_python, *options, "env", *(f"{name}={value}" for name, value in AS_RANK.items()),
                 sys.executable, "-c", STOPPED)  # fmt: skip
    assert done.stdout == ""
    assert done.stderr.startswith("hung: process-stopped, rank 0\n")
    assert done.stderr.endswith("\nmldebug: the job was ended, with all that it started\n")
    assert max(map(len, done.stderr.splitlines())) <= 80


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_changes_nothing_else(run_python: Run) -> None:
    done = watch(run_python, "-o", "/dev/full", "--", sys.executable, "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7
    assert "cannot write /dev/full: no space left on device" in done.stderr
    assert watch(run_python, "-o", "/dev/full", "--", "true").returncode == 1


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan"])
def test_a_timeout_that_is_none(run_python: Run, text: str) -> None:
    done = watch(run_python, "--timeout", text, "--", "true")
    assert done.returncode == 2
    assert "not a number of seconds above 0" in done.stderr


def test_a_command_that_is_not_there(run_python: Run) -> None:
    done = watch(run_python, "--", "no-such-command")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "mldebug: cannot run no-such-command: no such file or directory"


def test_options_of_the_job_are_its_own(run_python: Run) -> None:
    done = watch(run_python, sys.executable, "-c", "import sys; print(sys.argv[1:])", "--timeout", "3", "--json")
    assert (done.returncode, done.stdout) == (0, "['--timeout', '3', '--json']\n")
