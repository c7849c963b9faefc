"""logs() on what real jobs print: torchrun, four ranks, one that fails and others that feel it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.ranks import LogsReport, emulate, logs

from .rank_kit import FORKED

pytest.importorskip("torch")
pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.timeout(180)]

PROGRAM = str(Path(__file__).parent / "programs" / "one_rank_fails.py")
TORCHRUN = ["-m", "torch.distributed.run"]
# A launcher whose stdout and stderr are one file.
INTO = f"""
import os, runpy, sys
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT)
for stream in (1, 2):
    os.dup2(log, stream)
sys.argv[0] = {str(FORKED)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Torchrun = Callable[..., LogsReport]


@pytest.fixture
def torchrun(run_torch: Callable[..., Any], tmp_path: Path) -> Torchrun:
    """Everything that the job printed, in one file."""

    def run(*words: str) -> LogsReport:
        log = tmp_path / "job.log"
        where = ["--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        done = run_torch(INTO, log, *TORCHRUN, *where, *words, timeout=120)
        assert done.returncode == 1, log.read_text()
        return logs(log)

    return run


def test_one_rank_fails_and_the_others_are_victims(torchrun: Torchrun) -> None:
    report = torchrun(PROGRAM, "value", "2")
    cause, *victims = report.tracebacks
    assert (cause.ranks, cause.exception, cause.victim) == ((2,), "ValueError: bad batch", "")
    assert all(one.victim for one in victims)
    # -6: gloo aborts the process that is on its way out, where that takes long
    assert [one["rank"] for one in report.failures if one["exitcode"] in (1, -6)]
    assert sorted({rank for one in (*report.tracebacks, *report.silent) for rank in one.ranks}) == [0, 1, 2, 3]
    assert report.text().startswith("2 kinds of traceback; first" if victims else "1 kind of traceback; first")


def test_the_prefix_of_tee_and_the_hook_are_the_same_rank(torchrun: Torchrun, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    report = torchrun("--tee", "3", "--log-dir", str(folder), PROGRAM, "chain", "1")
    files = logs(folder)
    for found in (report, files):
        cause = found.tracebacks[0]
        assert (cause.ranks, cause.exception) == ((1,), "RuntimeError: no learning rate here")
        assert "KeyError: 'lr'\n\nThe above exception was the direct cause" in cause.text
        assert found.ranks == (0, 1, 2, 3)
        steps = [line for line in found.folded if line.text.startswith("step ")]
        assert [(line.who, line.text) for line in steps] == [
            ("[0-3]", f"step {n} loss {2.5 - n / 4}") for n in range(3)
        ]


def test_interleaved_asserts_are_one_kind_with_its_messages(torchrun: Torchrun) -> None:
    report = torchrun("--tee", "3", PROGRAM, "assert", "-1")
    cause = report.tracebacks[0]
    assert cause.exception.startswith("AssertionError: rank ")
    assert len(cause.ranks) > 1
    for message in cause.messages:
        assert message.text.endswith(f"{5 + message.ranks[0] % 2} rows")


def test_a_rank_that_was_killed_is_the_odd_one_out(torchrun: Torchrun) -> None:
    report = torchrun(PROGRAM, "kill", "3")
    assert all(one.victim for one in report.tracebacks)
    assert report.silent[0].ranks == (3,)
    assert "SIGKILL" in report.silent[0].ended
    assert "look at [3], which left no traceback" in " ".join(report.text().split()) or not report.tracebacks


def test_a_job_on_emulated_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = tmp_path / "job.log"
    with log.open("wb") as out:
        command = [sys.executable, str(FORKED), *TORCHRUN, "--nproc-per-node", "2", "--tee", "3", PROGRAM, "value", "3"]
        emulate(command, nodes=2, gpus_per_node=2, plain=True, stdout=out.fileno(), stderr=out.fileno())
    report = logs(log)
    assert (report.tracebacks[0].ranks, report.tracebacks[0].exception) == ((3,), "ValueError: bad batch")
    assert all(one.victim for one in report.tracebacks[1:])
