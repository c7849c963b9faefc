"""`mldebug comms` over hosts in namespaces, started by srun, mpirun and ssh, with one fault each: who is to blame is
named with its host, what was measured is kept, and nothing runs on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster.collectives._save import load
from tests.at_once import AtOnce, chosen
from tests.bed import bed as beds
from tests.bed import slurm as slurms
from tests.bed.bed import Bed
from tests.bed.slurm import Slurm

pytestmark = [
    pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}"),
    pytest.mark.timeout(300),
]
pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "cluster" / "programs" / "comms.py"
LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "NCCL_", "GLOO_", "MASTER_")
Done = subprocess.CompletedProcess[str]
QUICK = ("--backend", "gloo", "-n", "2", "-w", "1")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Those with a rank that dies or a host that is not heard wait, and go at once, each on hosts of its own."""
    ways = {"srun": killed_under_srun, "ssh": cut_under_ssh}
    with AtOnce(len(ways)) as found:
        for name in chosen(request, "name"):
            found.add(name, partial(on_own_hosts, ways[name], tmp_path_factory.mktemp(name)))
        yield found


def on_own_hosts(run: Callable[[Bed, Path], Done], folder: Path) -> tuple[Done, Path]:
    with Bed(2, folder / "bed") as bed:
        return run(bed, folder / "run.jsonl"), folder / "run.jsonl"


def environment(*faults: dict[str, Any]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COMMS_FAULTS": json.dumps(faults)}


def run(bed: Bed, *command: str, env: dict[str, str]) -> Done:
    done = bed.run("h1", *command, timeout=150, env=env)
    for _ in range(100):
        left = [line for host in bed.hosts for line in bed.processes(host, "comms_node")]
        if not left:
            break
        time.sleep(0.1)
    assert left == []
    return done


def killed_under_srun(bed: Bed, kept: Path) -> Done:
    slurm = Slurm(bed)
    env = slurm.env | environment({"rank": 3, "step": "time", "bytes": 65536, "do": "kill"})
    env["SLURM_CONF"] = slurm.env["SLURM_CONF"]
    words = ("srun", "-N2", "-n4", "--ntasks-per-node=2", "--kill-on-bad-exit=0", sys.executable, str(PROGRAM))
    done = run(bed, *words, "allreduce", *QUICK, "-e", "128K", "-o", str(kept), env=env)
    slurm.close()
    return done


@pytest.mark.skipif(bool(slurms.missing()), reason=f"no SLURM: {slurms.missing()}")
@pytest.mark.parametrize("name", ["srun"])
def test_srun_and_a_rank_that_is_killed(runs: AtOnce, name: str) -> None:
    done, kept = runs[name]
    assert done.returncode == 1, done.stdout + done.stderr
    told = load(str(kept))
    assert (told["ended"], told["culprits"]) == ("dead", [3])
    assert told["why"].startswith("rank 3 on h2 (pid ") and "was killed by SIGKILL" in told["why"]
    assert [row["bytes"] for row in told["rows"]] == [32768]
    assert done.stdout.count("comms: ended early (dead): rank 3 on h2") == 1  # rank 0 alone reports


def cut_under_ssh(bed: Bed, kept: Path) -> Done:
    python = kept.with_name("python")
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH={shlex.quote(str(ROOT))} {sys.executable} "$@"\n')
    python.chmod(0o755)

    def cut() -> None:
        for _ in range(1200):
            if kept.exists() and kept.read_text().count('"row"') > 1:
                bed.blackhole("h2")
                return
            time.sleep(0.05)

    cutter = threading.Thread(target=cut)
    cutter.start()
    words = ("--hosts", "h1,h2", "--nproc", "2", "--ssh-config", bed.ssh_config, "--remote-python", str(python))
    sizes = ("-b", "64K", "-e", "4M", "-i", "1K", "--backend", "gloo", "--timeout", "4")
    try:
        command = (sys.executable, str(PROGRAM), "comms", "all_reduce", *words, *sizes, "-o", str(kept))
        return bed.run("h1", *command, timeout=150, env=environment())
    finally:
        cutter.join()
        bed.join("h2")


@pytest.mark.parametrize("name", ["ssh"])
def test_ssh_and_a_host_that_falls_off_the_network(runs: AtOnce, name: str) -> None:
    """Its ranks and those of the other host all wait in torch: who is not heard any more is to blame."""
    done, kept = runs[name]
    assert done.returncode == 1, done.stdout + done.stderr
    told = load(str(kept))
    assert (told["ended"], told["culprits"]) == ("hang", [2, 3]), told["why"]
    assert told["why"].startswith("ranks 2, 3 cannot be reached: nothing is heard of h2 for ")
    assert len(told["rows"]) > 1


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_and_a_rank_that_is_slow(tmp_path: Path) -> None:
    """By itself, as others that compute make ranks slow."""
    with Bed(2, tmp_path / "bed") as bed:
        done = slow_under_mpirun(bed)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (told["world"], told["hosts"], told["wrong"]) == (4, ["h1", "h2"], 0)
    assert {row["collective"] for row in told["rows"]} == {"all_reduce", "all_gather"}
    assert [(one["rank"], one["host"]) for one in told["slow"]] == [(2, "h2")]


def slow_under_mpirun(bed: Bed) -> Done:
    launch = ("mpirun", "--allow-run-as-root", "--mca", "plm_rsh_args", f"-F {bed.ssh_config}", "-x", "PYTHONPATH")
    words = (
        *launch,
        "-x",
        "COMMS_FAULTS",
        "-x",
        "OMP_NUM_THREADS",
        "--host",
        "h1:2,h2:2",
        sys.executable,
        str(PROGRAM),
    )
    env = environment({"rank": 2, "step": "call", "do": "slow"})
    return run(bed, *words, "comms", "all_reduce", "all_gather", *QUICK, "-e", "32K", "--json", env=env)
