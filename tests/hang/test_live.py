"""`mldebug spy` on a job that runs: from torchrun to the verdict, and nothing is left stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs" / "guarded_gather.py"
LAUNCHER = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_running_job_is_judged_from_outside() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCHER, "--rdzv-endpoint", "127.0.0.1:0", str(PROGRAM)]
    job = subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        verdict = {}
        end = time.monotonic() + 90
        while time.monotonic() < end and verdict.get("kind") != "rank-guarded-collective":
            time.sleep(2)
            spy = [sys.executable, "-m", "mldebug", "spy", "--json", "--pid", str(job.pid)]
            done = subprocess.run(spy, capture_output=True, text=True, timeout=60, check=False)
            verdict = json.loads(done.stdout).get("verdict", {})
        assert (verdict["hung"], verdict["culprits"], done.returncode) == (True, [0], 1)
        assert verdict["kind"] == "rank-guarded-collective"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)  # the launcher ends its ranks
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
