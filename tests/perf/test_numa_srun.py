"""A real srun gives local tasks the masks in the order and with the numbers that `mldebug numa` prints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mldebug.perf.numa._nodes import hex_mask
from tests.bed import bed as beds
from tests.bed import slurm as slurms
from tests.bed.bed import Bed
from tests.bed.slurm import Slurm

WHY = beds.missing() or slurms.missing()
pytestmark = [pytest.mark.skipif(bool(WHY), reason=f"no SLURM: {WHY}"), pytest.mark.timeout(120)]
ROOT = Path(__file__).resolve().parents[2]


def test_each_task_gets_its_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = os.cpu_count() or 1
    if count < 2 or len(os.sched_getaffinity(0)) < count:
        pytest.skip("needs two CPUs, and all of the machine's")
    conf = slurms._CONF.replace("TaskPlugin=task/none", "TaskPlugin=task/affinity")
    monkeypatch.setattr(slurms, "_CONF", conf)
    masks = ",".join(hex_mask({cpu}) for cpu in (1, 0))
    say = 'echo "$SLURM_LOCALID $("$0" -m mldebug numa --json)"'
    with Bed(1, tmp_path / "bed") as bed:
        slurm = Slurm(bed, cpus=count)
        slurm.env |= {"PYTHONPATH": str(ROOT)}
        words = ("srun", "-n2", "--exclusive", f"--cpu-bind=mask_cpu:{masks}", "sh", "-c", say, sys.executable)
        done = slurm.run(*words, timeout=90)
        slurm.close()
    assert done.returncode == 0, done.stderr
    seen = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert {local: json.loads(text)["allowed"] for local, text in seen.items()} == {"0": "1", "1": "0"}
