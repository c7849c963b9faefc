"""The classic benchmarks of the input side, by their names and with their tables."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SMALL = ["--batch-size", "100", "--numbers", "100", "--rounds", "1"]


def test_num_workers_bench(run_torch: Run) -> None:
    pytest.importorskip("torch")
    words = [*SMALL, "--step-seconds", "0.15", "--sample-seconds", "0.001", "--max-workers", "2"]
    done = run_torch(TOOLS / "num-workers-bench.py", *words)
    rows = re.findall(r"^num_workers=(\d): average time: (\d+\.\d{3})$", done.stdout, re.M)
    assert [row[0] for row in rows] == ["0", "1", "2"], done
    # 10 batches of 100 samples at 1 ms: a second where nothing is read ahead, and less where two workers do
    assert float(rows[0][1]) > 0.95 and float(rows[2][1]) < float(rows[0][1]), done.stdout


def test_pin_memory_non_block_bench(run_torch: Run) -> None:
    pytest.importorskip("torch")
    done = run_torch(TOOLS / "pin-memory-non-block-bench.py", *SMALL, "--step-seconds", "0.02", "--num-workers", "1")
    form = r"^pin_memory=( True|False), non_blocking=( True|False): average time: \d+\.\d{3}$"
    rows = re.findall(form, done.stdout, re.M)
    assert [tuple(word.strip() for word in row) for row in rows] == [
        ("True", "True"), ("True", "False"), ("False", "True"), ("False", "False"),
    ], done  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="binding needs Linux")
def test_numa_set(run_python: Run) -> None:
    program = "import os, subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    env = {"LOCAL_RANK": "0", "RANK": "3", "WORLD_SIZE": "4", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    inner = "import os, sys; print('ran', 'MLDEBUG_NUMA_TREE' in os.environ); sys.exit(9)"
    done = run_python("-c", program, "bash", TOOLS / "numa-set.sh", sys.executable, "-c", inner, env=env)
    assert done.returncode == 9, done.stderr
    assert done.stdout == "Starting local rank 3 on NUMA node -1\nran False\n"
    done = run_python("-c", program, "bash", TOOLS / "numa-set.sh", "no-such-program", env=env)
    assert done.returncode == 1 and "cannot run no-such-program" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="binding needs Linux")
def test_numa_set_under_torchrun(run_python: Run) -> None:
    pytest.importorskip("torch")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--role", ":", "--tee", "3")
    code = "import os; cores=os.sched_getaffinity(0); print(f'{len(cores)} visible cpu cores: {cores}')"
    env = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(*launch, "--no-python", TOOLS / "numa-set.sh", sys.executable, "-c", code, timeout=110, env=env)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"[:{rank}]:Starting local rank {rank} on NUMA node -1\n" in done.stdout
        assert re.search(rf"^\[:{rank}\]:\d+ visible cpu cores: \{{\d", done.stdout, re.M), done.stdout
