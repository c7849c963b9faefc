"""`mldebug spy` and `watch` on jobs that use NCCL: two or four GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

PROGRAMS = Path(__file__).parents[1] / "hang" / "programs"
RANKS = 4 if torch.cuda.device_count() >= 4 else 2
ODD = min(2, RANKS - 1)
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)


@contextlib.contextmanager
def job(program: str, *args: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*LAUNCH, str(PROGRAMS / program), *args], env={**os.environ, **environment}, start_new_session=True,
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield process
        except AssertionError:
            log.seek(0)
            print(f"the job, status {process.poll()}, said: {log.read()[-3000:]}")
            raise
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def spy(pid: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "mldebug", "spy", "--json", "--pid", str(pid)]
    if folder := os.environ.get("NCCL_EVIDENCE"):  # where to keep what was seen
        command += ["-o", f"{folder}/{os.environ['PYTEST_CURRENT_TEST'].split('::')[1].split(' ')[0]}.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"verdict": {}, "error": done.stderr}
    return report


def verdict_of(process: subprocess.Popen[bytes], seconds: float = 60) -> dict[str, Any]:
    """The first verdict that says hung, or the last one."""
    until, verdict = time.monotonic() + seconds, {"hung": False}
    while time.monotonic() < until and process.poll() is None and not verdict["hung"]:
        time.sleep(3)
        verdict = spy(process.pid)["verdict"] or verdict
    return verdict


def watch(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mldebug", "watch", "--timeout", "8", "--on-hang", "spy,kill", "--json", "--"]
    command += [*LAUNCH, str(PROGRAMS / program), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize(
    ("how", "recorder"),
    [(how, "none") for how in ("item", "ahead", "mixed", "ddp")]
    + [(how, "off") for how in ("item", "ddp")]
    + [(how, "agent") for how in ("item", "mixed", "ddp")],
)
def test_a_rank_that_leaves_out_one_all_reduce_is_named(how: str, recorder: str, tmp_path: Path) -> None:
    """With no code in the job; also with torch's own flight recorder turned off; and with the agent."""
    if recorder == "agent" and not Path(sysconfig.get_paths()["purelib"], "mldebug_agent.pth").exists():
        pytest.skip("mldebug is not installed here, so its agent cannot enter a job")
    environment = {"off": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "agent": {"MLDEBUG_AGENT": str(tmp_path)}}
    with job("nccl_skip.py", how, **environment.get(recorder, {})) as process:
        verdict = verdict_of(process)
        assert verdict["hung"], verdict
        assert verdict["culprits"] == [ODD], verdict["text"]
        assert verdict["kind"] == "skipped-collective", verdict["text"]


@pytest.mark.parametrize("how", ["long", "late", "alone"])
def test_slow_work_on_gpus_is_not_taken_for_a_hang(how: str) -> None:
    with job("nccl_healthy.py", how, "8") as process:
        reports = []
        while process.poll() is None and len(reports) < 4:
            time.sleep(4)
            report = spy(process.pid)
            if report["verdict"]:
                reports.append(report["verdict"])
    assert reports
    assert not any(verdict["hung"] for verdict in reports), reports


def test_watch_names_the_rank_and_leaves_no_process() -> None:
    done = watch("nccl_skip.py", "mixed")
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["hung"], verdict["culprits"], verdict["kind"]) == (True, [ODD], "skipped-collective"), verdict
    left = subprocess.run(["pgrep", "-f", "nccl_skip.py"], capture_output=True, text=True, check=False).stdout
    assert not left.strip()


def test_watch_lets_slow_steps_on_gpus_go_on() -> None:
    done = watch("nccl_healthy.py", "long", "8")
    report = json.loads(done.stdout)
    assert not report["verdict"]["hung"], report["verdict"]
    assert done.returncode == 0
