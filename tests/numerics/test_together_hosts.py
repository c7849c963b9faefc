"""The ranks of two hosts, under one torchrun job: they stop together and run a sharded forward again together."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.bed import bed as beds
from tests.bed.bed import Bed

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}"),
    pytest.mark.timeout(300),
]


def test_ranks_of_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "train-raise").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    program = [str(ROOT / "tests" / "programs" / "sharded_event.py"), str(tmp_path), "fsdp", "train:raise"]
    with Bed(2, tmp_path / "bed") as bed:
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", "h1:29500"),
            *("--rdzv-conf", "join_timeout=200"),
        ]
        out = tmp_path / "out"
        with out.open("wb") as file:
            jobs = [bed.start(host, *torchrun, *program, env=env, stdout=file, stderr=file) for host in bed.hosts]
            status = [job.wait(250) for job in jobs]
        names = {bed.run(host, "hostname").stdout.strip() for host in bed.hosts}
    said = out.read_text()
    assert status == [1, 1], said
    told = [json.loads((tmp_path / "train-raise" / f"rank{rank}.json").read_text()) for rank in range(2)]
    seen = next(one["event"] for one in told if "event" in one)
    for rank, one in enumerate(told):
        report = one["raised"]
        assert (report["first_rank"], report["event"]["step"], report["rank"]) == (1, 3, rank)
        assert one["end"] - seen < 10
        assert report["ranks"][0]["host"] in names
        operation = json.loads((tmp_path / f"fsdp.rank{rank}.json").read_text())["event"]
        assert (operation["op"], operation["again"], operation["rank"]) == ("aten.div.Tensor", "shown", 1)
