"""Ranks that wait for one that goes first, or is held, longer than the timeouts of NCCL are."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = Path(__file__).parents[2]
LONG = 35.0  # the process group's timeout is 10 s, that of the heartbeat 12 s


def test_no_watchdog_barks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    short = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "12", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, str(ROOT / "tests" / "ranks" / "programs" / "nccl.py"), str(LONG)],
        env={**os.environ, **short},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    said = []
    try:
        for line in job.stderr:
            said.append(line)
            if match := re.search(r"nc -U (\S+?)`", line):
                break
        else:
            pytest.fail("".join(said))
        time.sleep(LONG)
        assert job.poll() is None
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(match.group(1))
            one.sendall(b"c\n")
            while one.recv(65536):
                pass
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, "".join(said) + err
    expected = "8.0" if torch.cuda.device_count() > 1 else "1.0"
    assert sorted(re.findall(r"rank (\d) total (\S+)", out)) == [("0", expected), ("1", expected)]
    assert not re.search("[Ww]atchdog|[Hh]eartbeat", "".join(said) + err)
