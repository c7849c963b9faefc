"""doctor on real hosts: three of them in namespaces here, reached by sshd and by SLURM, with faults."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bed import bed as beds
from tests.bed import slurm as slurms
from tests.bed.bed import Bed
from tests.bed.slurm import Slurm

pytest.importorskip("ClusterShell")
pytestmark = [
    pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}"),
    pytest.mark.timeout(200),
]
ROOT = Path(__file__).resolve().parent.parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
DOCTOR = (sys.executable, "-m", "mldebug", "doctor", "--json")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with Bed(3, tmp_path_factory.mktemp("bed")) as found:
        yield found


def ask(bed: Bed, *words: str, env: dict[str, str] | None = None) -> tuple[dict[str, Any], int, float]:
    """The document of `mldebug doctor` on h1, its status, and how long it took."""
    began = time.monotonic()
    done = bed.run("h1", *DOCTOR, *words, env={**ENV, **(env or {})})
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.returncode, time.monotonic() - began


def over_ssh(bed: Bed, *words: str, hosts: str = "h[1-3]") -> tuple[dict[str, Any], int, float]:
    return ask(bed, "--hosts", hosts, "--ssh-config", bed.ssh_config, *words)


def bad(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(host, one["check"]) for one in document["culprits"] for host in one["hosts"]}


def test_three_healthy_hosts(bed: Bed) -> None:
    document, status, took = over_ssh(bed)
    print(f"{took:.1f} s")
    assert [node["host"] for node in document["evidence"]["nodes"]] == ["h1", "h2", "h3"]
    assert (bad(document), status) == (set(), 0)
    assert any(one["check"] == "clock" and one["level"] == "ok" for one in document["findings"])
    assert bed.processes("h1", "ssh -") == []


def test_a_host_that_is_frozen_and_one_that_is_not_there(bed: Bed) -> None:
    bed.freeze("h3")
    try:
        document, status, took = over_ssh(bed, "--timeout", "9", hosts="h1,h2,h3,h7")
    finally:
        bed.thaw("h3")
    assert (bad(document), status) == ({("h3", "node"), ("h7", "node")}, 1)
    assert took < 15
    assert len(document["evidence"]["nodes"]) == 2


def test_a_name_that_leads_to_the_loopback(bed: Bed) -> None:
    wrong = bed.folder / "wrong_hosts"
    lines = [line for line in (bed.folder / "hosts").read_text().splitlines() if "h2" not in line.split()]
    wrong.write_text("\n".join([*lines, "127.0.1.1 h2"]) + "\n")
    assert bed.run("h2", "mount", "--bind", str(wrong), "/etc/hosts").returncode == 0
    try:
        document, status, _ = over_ssh(bed)
    finally:
        bed.run("h2", "umount", "/etc/hosts")
    assert (bad(document), status) == ({("h2", "host name")}, 1)


def test_a_filtered_network_is_named(bed: Bed) -> None:
    assert bed.run("h2", "ip", "link", "set", "eth0", "down").returncode == 0
    try:
        document, status, _ = over_ssh(bed, "--timeout", "9")
    finally:
        bed.run("h2", "ip", "link", "set", "eth0", "up")
    assert (bad(document), status) == ({("h2", "node")}, 1)


def test_slurm(bed: Bed, tmp_path: Path) -> None:
    if slurms.missing():
        pytest.skip(f"no SLURM: {slurms.missing()}")
    slurm = Slurm(bed)
    try:
        job = slurm.run("sbatch", "--parsable", "--nodes=3", "--output=/dev/null", "--wrap=sleep 100").stdout.strip()
        document: dict[str, Any] = {}
        for _ in range(200):
            state = slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%T").stdout.strip()
            if state == "RUNNING":
                break
            time.sleep(0.5)
        document, status, _ = ask(bed, "--slurm", job, env=slurm.env)
        assert [node["host"] for node in document["evidence"]["nodes"]] == ["h1", "h2", "h3"]
        assert (bad(document), status) == (set(), 0)
        # As ranks of a step, each of them writes its own file; what they print would be mixed up.
        step = ["srun", "--nodes=3", "--ntasks-per-node=1", "--overlap", f"--jobid={job}"]
        env = {**ENV, **slurm.env, "PYTHONPATH": str(ROOT)}
        bed.run("h1", *step, *DOCTOR, "-q", "-o", str(tmp_path / "doctor-%h.json"), env=env)
        document, status, _ = ask(bed, "--from", *(str(path) for path in tmp_path.glob("doctor-*.json")))
        assert sorted(node["host"] for node in document["evidence"]["nodes"]) == ["h1", "h2", "h3"]
        assert status == 0
    finally:
        slurm.close()


def test_mpirun(bed: Bed, tmp_path: Path) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("not installed: apt-get install openmpi-bin")
    agent = ["--mca", "plm_rsh_agent", f"ssh -F {bed.ssh_config}", "--mca", "btl_tcp_if_include", "eth0"]
    command = [
        "mpirun",
        "--allow-run-as-root",
        *agent,
        "--mca",
        "oob_tcp_if_include",
        "eth0",
        "--host",
        "h1,h2,h3",
        "-x",
        "PYTHONPATH",
    ]
    done = bed.run("h1", *command, *DOCTOR, "-q", "-o", str(tmp_path / "doctor-%h.json"), env=ENV)
    document, status, _ = ask(bed, "--from", *(str(path) for path in tmp_path.glob("doctor-*.json")))
    assert sorted(node["host"] for node in document["evidence"]["nodes"]) == ["h1", "h2", "h3"], done.stderr
    assert (bad(document), status) == (set(), 0)
