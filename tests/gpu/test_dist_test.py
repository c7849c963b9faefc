"""`mldebug dist-test` on NCCL: one GPU, and all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "dist_test.py"
GPUS = torch.cuda.device_count()
if not GPUS:
    pytest.skip("needs a GPU", allow_module_level=True)


def run(*words: str | Path, **env: str) -> tuple[dict[str, Any], int, float]:
    """The document, the exit status and the seconds that the command took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *map(str, words), "--json"], env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, time.monotonic() - began


def test_all_gpus_are_tested_within_12_seconds() -> None:
    report, status, seconds = run(PROGRAM)
    print(f"{GPUS} GPUs: {seconds:.1f} s wall, {report['seconds']:.1f} s in the collector")
    assert status == 0, report["culprits"]
    assert report["world"] == GPUS and report["backend"] == "nccl"
    for one in report["evidence"]["ranks"].values():
        assert one["facts"]["nccl"] and one["facts"]["driver"] and one["facts"]["device"]["uuid"]
        assert one["checks"]["memory"]["bytes"] > 0.8 * one["facts"]["device"]["memory"]
        assert one["checks"]["copy"]["to_GBps"] > 1
        assert "all_reduce bf16 64 MiB" in one["checks"] and "reduce_scatter fp32 4 B" in one["checks"]
    assert seconds < 12


def test_the_classic_command_line() -> None:
    tool = ROOT / "tools" / "torch-distributed-gpu-test.py"
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", str(GPUS), "--nnodes", "1")
    report, status, _ = run(*launch, tool, "--bytes", "4,1M")
    assert status == 0 and report["world"] == GPUS


def test_two_ranks_on_one_gpu_are_named_before_nccl_fails() -> None:
    report, status, seconds = run(PROGRAM, "--nproc", "2", "--timeout", "15", CUDA_VISIBLE_DEVICES="0")
    assert status == 1 and seconds < 30
    assert [(one["kind"], one["rank"]) for one in report["culprits"]] == [("duplicate", 1)]
    assert report["culprits"][0]["gpu"].startswith("cuda:0 GPU-")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("at", ["init", "all_reduce bf16 64 MiB"])
@pytest.mark.parametrize("do, kind", [("stop", "stopped"), ("wait", "behind"), ("kill", "dead")])
def test_a_rank_that_does_not_come_is_named(at: str, do: str, kind: str) -> None:
    fault = json.dumps({"ranks": [1], "at": at, "do": do})
    report, status, seconds = run(PROGRAM, "--timeout", "8", DIST_FAULT=fault)
    assert status == 1 and seconds < 40
    assert [(one["kind"], one["rank"]) for one in report["culprits"]] == [(kind, 1)], report["culprits"]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_one_wrong_value_is_the_senders() -> None:
    report, status, _ = run(PROGRAM, "--bytes", "4,64K", DIST_FAULT=json.dumps({"ranks": [1], "do": "corrupt"}))
    assert status == 1 and [(one["kind"], one["rank"]) for one in report["culprits"]] == [("wrong contents", 1)]
