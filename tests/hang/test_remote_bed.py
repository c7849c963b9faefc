"""`mldebug spy` on real hosts: three of them in namespaces here, reached by sshd and by SLURM, with faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bed import bed as beds
from tests.bed import slurm as slurms
from tests.bed.bed import Bed
from tests.bed.slurm import Slurm

pytest.importorskip("torch")
pytest.importorskip("ClusterShell")
pytestmark = [
    pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = Path(__file__).parent / "programs" / "skip_on_rank_two.py"
LAUNCH = (
    "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
    "--rdzv-id", "job", "--rdzv-endpoint", "h1:29500", "--rdzv-conf", "join_timeout=200", str(PROGRAM),
)  # fmt: skip
ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Job:
    """Six ranks on three hosts that hang, since rank 2 skips a collective."""

    bed: Bed
    slurm: Slurm | None
    number: str  # of the job in SLURM
    ranks: dict[str, list[int]]  # host -> its ranks

    def spy(self, way: str, *words: str, seconds: float = 30) -> tuple[dict[str, Any], float]:
        """The document of `mldebug spy` on h1, and how long it took. Nothing of it may be left there."""
        where = ["--hosts", "h[1-3]", "--ssh-config", self.bed.ssh_config]
        if way == "slurm":
            if self.slurm is None:
                pytest.skip(f"no SLURM: {slurms.missing()}")
            where = ["--slurm", self.number]
        env = {**ENV, **(self.slurm.env if self.slurm else {})}
        # As inside of another job, whose variables must not become options of ours.
        env |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "7", "SLURM_MEM_PER_CPU": "5", "SLURM_NNODES": "9"}
        command = [sys.executable, "-m", "mldebug", "spy", *where, "--json", "--timeout", str(seconds), *words]
        began = time.monotonic()
        done = self.bed.run("h1", *command, env=env)
        took = time.monotonic() - began
        assert took < seconds, f"{took:.1f} s: {done.stderr}"
        assert done.stdout, done.stderr
        assert self.bed.processes("h1", "ssh -") + self.bed.processes("h1", "--jobid") == []
        return json.loads(done.stdout), took

    def left(self, host: str) -> list[str]:
        """What of mldebug is on a host, once what is under way had time to end."""
        for _ in range(100):
            found = self.bed.processes(host, "mldebug.cli") + self.bed.processes(host, "py-spy")
            if not found:
                break
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Bed(3, tmp_path_factory.mktemp("bed")) as bed:
        slurm, number = None, ""
        silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": "/"}
        if not slurms.missing():
            slurm = Slurm(bed)
            settings = "GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1"
            wrapped = f"srun env {settings} {sys.executable} {' '.join(LAUNCH)}"
            batch = ["sbatch", "--parsable", "--nodes=3", "--ntasks-per-node=1", "--output=/dev/null"]
            done = slurm.run(*batch, f"--wrap={wrapped}")
            number = done.stdout.strip()
            assert number.isdecimal(), done.stderr
        else:
            for host in bed.hosts:
                bed.start(host, sys.executable, *LAUNCH, env=ENV, **silent)
        found = Job(bed, slurm, number, {})
        document: dict[str, Any] = {}
        for _ in range(60):
            time.sleep(2)
            document, _ = found.spy("hosts")
            if document["verdict"]["kind"] == "skipped-collective":
                break
        else:
            pytest.fail(f"the job did not come to its hang: {document}")
        for rank in document["ranks"]:
            found.ranks.setdefault(rank["host"], []).append(rank["rank"])
        yield found
        if slurm is not None:
            slurm.close()


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {host["host"]: host["status"] for host in document["hosts"]}


WAYS = pytest.mark.parametrize("way", ["hosts", "slurm"])


@WAYS
def test_three_hosts(job: Job, way: str) -> None:
    document, took = job.spy(way)
    print(f"{way}: {took:.1f} s")
    verdict = document["verdict"]
    assert (verdict["hung"], verdict["kind"], verdict["culprits"]) == (True, "skipped-collective", [2])
    assert verdict["sure"] == "high"
    assert statuses(document) == {"h1": "ok", "h2": "ok", "h3": "ok"}
    assert [rank["rank"] for rank in document["ranks"]] == list(range(6))
    assert [job.left(host) for host in job.bed.hosts] == [[], [], []]


def test_gateways(job: Job) -> None:
    document, _ = job.spy("hosts", "--fanout", "2")
    assert statuses(document) == {"h1": "ok", "h2": "ok", "h3": "ok"}
    assert document["verdict"]["culprits"] == [2]


@pytest.mark.parametrize(
    ("option", "status", "words"),
    [
        ("UserKnownHostsFile=/dev/null", "failed", "its host key is not known here"),
        ("IdentityFile=/dev/null", "failed", "no permission to log in"),
        ("Port=2222", "unreachable", "no sshd listens there"),
        ("HostName=no-such-host", "unreachable", "no host of that name"),
        ("NoSuchOption=1", "failed", "ssh does not start"),
    ],
)
def test_what_ssh_says_is_understood(job: Job, option: str, status: str, words: str) -> None:
    if option.startswith("IdentityFile"):  # what the file gives is added to what the option does
        config = job.bed.folder / "no_key"
        config.write_text(Path(job.bed.ssh_config).read_text().replace("login.key", "h1.key"))
        document, _ = job.spy("hosts", "--ssh-config", str(config))
    else:
        document, _ = job.spy("hosts", "--ssh-option", option)
    assert statuses(document) == dict.fromkeys(("h1", "h2", "h3"), status)
    assert all(words in host["why"] for host in document["hosts"]), document["hosts"]
    assert not document["verdict"]["hung"]


def test_one_step_for_all_nodes_of_a_large_job(job: Job) -> None:
    """Asked by one srun first; a node that it loses is asked again by itself."""
    if job.slurm is None or not job.bed.can_freeze():
        pytest.skip(f"no SLURM: {slurms.missing()}" if job.slurm is None else "no freezer among the cgroups")
    program = (
        "import json, sys\nfrom mldebug.hang import _remote_ways as ways, collect_remote, judge\n"
        "ways._FEW = 1\nevidence = collect_remote(slurm=sys.argv[1], timeout=float(sys.argv[2]))\n"
        "print(json.dumps([evidence['hosts'], judge(evidence).culprits]))\n"
    )
    env = {**ENV, **job.slurm.env}
    done = job.bed.run("h1", sys.executable, "-c", program, job.number, "20", env=env)
    hosts, culprits = json.loads(done.stdout)
    assert ({host["status"] for host in hosts}, culprits) == ({"ok"}, [2]), done.stderr
    job.bed.freeze("h3")
    try:
        began = time.monotonic()
        done = job.bed.run("h1", sys.executable, "-c", program, job.number, "12", env=env)
        assert time.monotonic() - began < 12
    finally:
        job.bed.thaw("h3")
    hosts, culprits = json.loads(done.stdout)
    assert [host["status"] for host in hosts] == ["ok", "ok", "timeout"] and culprits == [2]
    assert job.bed.processes("h1", "--jobid") == [] and job.left("h3") == []


@WAYS
def test_a_stopped_rank(job: Job, way: str) -> None:
    document, _ = job.spy("hosts")
    victim = next(rank for rank in document["ranks"] if rank["host"] == "h2")
    job.bed.run("h2", "kill", "-STOP", str(victim["pid"]))
    try:
        document, _ = job.spy(way)
    finally:
        job.bed.run("h2", "kill", "-CONT", str(victim["pid"]))
    assert document["verdict"]["kind"] == "process-stopped"
    assert document["verdict"]["culprits"] == [victim["rank"]]


@WAYS
def test_a_frozen_host(job: Job, way: str) -> None:
    if not job.bed.can_freeze():
        pytest.skip("no freezer among the cgroups")
    job.bed.freeze("h3")
    try:
        document, took = job.spy(way, seconds=9)
    finally:
        job.bed.thaw("h3")
    print(f"{way}: {took:.1f} s")
    assert statuses(document) == {"h1": "ok", "h2": "ok", "h3": "timeout"}
    assert document["absent"] == job.ranks["h3"]
    # What is seen says enough: rank 2 is not where the others wait.
    assert (document["verdict"]["hung"], document["verdict"]["culprits"]) == (True, [2])
    assert document["verdict"]["sure"] != "high" and "h3" in document["verdict"]["text"]
    assert job.left("h3") == []


def test_a_host_that_freezes_while_it_is_asked(job: Job) -> None:
    """The ssh client is ended; what it started there goes on when the host does, and ends by its own deadline."""
    if not job.bed.can_freeze():
        pytest.skip("no freezer among the cgroups")
    waits = [sys.executable, "-c", "import sys, time; time.sleep(2.5); open(sys.argv[1], 'w').write('FROZEN')"]
    group = job.bed.group("h3") / "freezer.state"
    if not group.exists():
        pytest.skip("only cgroup v1 freezes by one word")
    freezer = subprocess.Popen([*waits, str(group)])
    try:
        document, _ = job.spy("hosts", "--samples", "20", "--interval", "0.5", seconds=8)
        assert statuses(document)["h3"] == "timeout"
    finally:
        freezer.wait()
        job.bed.thaw("h3")
    assert job.left("h3") == []


@WAYS
def test_an_unreachable_host(job: Job, way: str) -> None:
    job.bed.blackhole("h2")
    try:
        document, took = job.spy(way, seconds=9)
    finally:
        job.bed.join("h2")
    print(f"{way}: {took:.1f} s")
    assert statuses(document)["h2"] in ("unreachable", "timeout")
    verdict = document["verdict"]
    assert (verdict["hung"], verdict["kind"]) == (True, "missing-rank")
    assert verdict["culprits"] == job.ranks["h2"]  # all others wait, so the host that is silent is the suspect
    assert "h2" in verdict["text"] and verdict["sure"] != "high"
    assert job.left("h2") == []


@WAYS
def test_a_crashed_host(job: Job, way: str) -> None:
    """The last: it does not come back."""
    if way == "hosts":
        job.bed.crash("h3")
    document, took = job.spy(way, seconds=9)
    print(f"{way}: {took:.1f} s")
    assert statuses(document)["h3"] in ("unreachable", "timeout", "failed")
    assert next(host["why"] for host in document["hosts"] if host["host"] == "h3")
    assert document["absent"] == job.ranks["h3"]
    assert document["verdict"]["hung"] and "h3" in document["verdict"]["text"]
