"""Two ranks on NCCL stop together: each raises, or is ended where it waits for the device, and names rank 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks on NCCL need two GPUs"),
]


def test_nan_on_one_of_two_gpus(tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "programs" / "stop_on_gpus.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(program), str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    event = json.loads((tmp_path / "rank1.json").read_text())["event"]
    for rank in range(2):
        path = tmp_path / f"lines.rank{rank}.jsonl"
        found = [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == "event"]
        assert found and found[0]["first_rank"] == 1 and found[0]["event"]["rank"] == 1, done.stdout
        assert path.stat().st_mtime - event < 10, done.stdout
