"""`mldebug pairs` on NCCL: needs two GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mldebug.cluster import load_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "pairs.py"
GPUS = torch.cuda.device_count()
if GPUS < 2:
    pytest.skip(f"needs two GPUs, and {GPUS} are here", allow_module_level=True)


def run(*words: str, **env: str) -> tuple[dict[str, Any], int, float]:
    """The document, the exit status and the seconds that the command took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words, "--json"], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, time.monotonic() - began


def test_all_pairs_within_25_seconds(tmp_path: Path) -> None:
    told, status, seconds = run("-o", str(tmp_path / "pairs.json"))
    evidence = load_pairs(tmp_path / "pairs.json")
    print(f"{GPUS} GPUs: {seconds:.1f} s; GBps {evidence['gbps']}, both ways {evidence['both_gbps']}")
    print(f"latency_us {evidence['latency_us']}")
    assert status == 0, told
    assert told["pairs"] == {"ok": GPUS * (GPUS - 1)}
    assert all(value and value > 1 for value in (*evidence["gbps"], *evidence["both_gbps"]))
    assert all(value and 0 < value < 1000 for value in evidence["latency_us"])
    assert seconds < 25


@pytest.mark.parametrize("do, status, what", [("stop", "hang", "SIGSTOP"), ("kill", "dead", "SIGKILL")])
def test_a_bad_worker_is_named(tmp_path: Path, do: str, status: str, what: str) -> None:
    faults = json.dumps([{"gpu": 1, "peer": 0, "do": do}])
    told, code, _ = run("--timeout", "15", "-o", str(tmp_path / "pairs.json"), PAIRS_FAULTS=faults)
    evidence = load_pairs(tmp_path / "pairs.json")
    ends = {
        frozenset((src, dst)): one
        for src, dst, one in zip(evidence["src"], evidence["dst"], evidence["status"], strict=True)
    }
    assert code == 1 and ends.pop(frozenset((0, 1))) == status
    assert set(ends.values()) <= {"ok"}
    assert what in told["verdict"]["findings"][0]["reading"]


def test_corrupted_contents_are_seen(tmp_path: Path) -> None:
    _, code, _ = run("-o", str(tmp_path / "pairs.json"), PAIRS_FAULTS=json.dumps([{"gpu": 1, "do": "corrupt"}]))
    evidence = load_pairs(tmp_path / "pairs.json")
    wrong = [src for src, one in zip(evidence["src"], evidence["status"], strict=True) if one == "wrong"]
    assert code == 1 and wrong == [1] * (GPUS - 1)


@pytest.mark.skipif(shutil.which("sendrecv_perf") is None, reason="nccl-tests' sendrecv_perf is not on PATH")
def test_bandwidth_is_that_of_nccl_tests(tmp_path: Path) -> None:
    """Both ways at once, as sendrecv_perf does: within 5%."""
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    done = subprocess.run(
        ["sendrecv_perf", "-b", "256M", "-e", "256M", "-g", "2", "-n", "50", "-w", "10"],
        env={**os.environ, **two}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    line = re.search(r"^\s*268435456\s.*$", done.stdout, re.MULTILINE)
    assert line is not None, done.stdout + done.stderr
    theirs = float(line[0].split()[7])  # busbw, out of place
    run("--nproc", "2", "-o", str(tmp_path / "pairs.json"), **two)
    ours = load_pairs(tmp_path / "pairs.json")["both_gbps"][0]
    print(f"sendrecv_perf {theirs} GBps, pairs {ours} GBps")
    assert ours is not None and abs(ours / theirs - 1) < 0.05
