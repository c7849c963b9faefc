"""`mldebug comms` on NCCL: needs two GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mldebug.cluster import comms
from mldebug.cluster.collectives._save import load
from mldebug.cluster.collectives._table import COLLECTIVES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "comms.py"
GPUS = torch.cuda.device_count()
if GPUS < 2:
    pytest.skip(f"needs two GPUs, and {GPUS} are here", allow_module_level=True)


def run(*words: str, faults: Any = ()) -> tuple[int, str, float]:
    """The exit status, what it said, and the seconds that it took."""
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COMMS_FAULTS": json.dumps(list(faults))}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def test_the_whole_sweep_within_30_seconds(tmp_path: Path) -> None:
    status, said, seconds = run("allreduce", "-o", str(tmp_path / "run.json"))
    print(f"{said}\n{seconds:.1f} s")
    told = load(str(tmp_path / "run.json"))
    assert status == 0 and seconds < 30
    modes = {row["bytes"]: row["in_place"]["mode"] for row in told["rows"]}
    assert modes[32 << 10] == "graph" and modes[max(modes)] == "queued"
    assert all(row["chosen"] for row in told["rows"]), "NCCL's choices were not read from its log"
    assert all(rank["routes"] for rank in told["ranks"])


def test_all_collectives_deliver_what_they_should() -> None:
    report = comms("all", first=1 << 20, last=64 << 20, factor=64, dtypes=["bfloat16", "float32"])
    print(report.text())
    assert report.ok and not report.evidence["notes"]
    assert {(row["collective"], row["dtype"]) for row in report.rows} == {
        (name, dtype) for name in COLLECTIVES for dtype in ("bfloat16", "float32")
    }
    assert all(set(COLLECTIVES[row["collective"]].places) <= set(row) for row in report.rows)


@pytest.mark.parametrize("mode", ["graph", "queued", "barrier"])
def test_modes(mode: str) -> None:
    report = comms(first=1 << 20, last=1 << 20, mode=mode)
    assert report.ok and {row["in_place"]["mode"] for row in report.rows} == {mode}


@pytest.mark.parametrize(
    "do, ended, why",
    [("kill", "dead", "SIGKILL"), ("stop", "hang", "SIGSTOP"), ("hang", "hang", "did not come as far")],
)
def test_a_bad_rank_is_named(tmp_path: Path, do: str, ended: str, why: str) -> None:
    path = tmp_path / "run.jsonl"
    faults = [{"rank": 1, "step": "time", "bytes": 4 << 20, "do": do}]
    status, said, _ = run("allreduce", "-b", "1M", "-e", "16M", "--timeout", "5", "-o", str(path), faults=faults)
    told = load(str(path))
    assert status == 1, said
    assert (told["ended"], told["culprits"]) == (ended, [1]) and why in told["why"]
    assert [row["bytes"] for row in told["rows"]] == [1 << 20, 2 << 20]


def test_a_full_card_is_said(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info(0)[0]
    held = torch.empty(free - (6 << 30), dtype=torch.uint8, device="cuda:0")  # NCCL and a context need some, too
    report = comms(first=1 << 28, last=16 << 30, in_place_only=True)
    del held
    assert report.ok and report.rows
    assert re.match(r"the largest size is \S+ [MG]iB and not 16 GiB: rank 0 has", report.evidence["notes"][0])
