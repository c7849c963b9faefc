"""dist-test over three hosts in namespaces, started by srun, mpirun, torchrun and ssh, with one fault each: the culprit
has to be named right, and first, and nothing may be left behind.

Each of them mostly waits, so a few run at once: as jobs of one SLURM, and on hosts of its own where the fault is the
host's."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.at_once import AtOnce, chosen
from tests.bed import bed as beds
from tests.bed import slurm as slurms
from tests.bed.bed import Bed
from tests.bed.slurm import Slurm

pytestmark = [
    pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(__file__).parent / "programs" / "dist_test.py")
ENV = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}


AT_ONCE = 6
LATE = 12  # seconds without progress after which a rank is named: a busy machine takes some to start one


@dataclass(frozen=True)
class Told:
    """What came of one dist-test."""

    report: dict[str, Any]
    status: int
    err: str
    left: list[str]  # what of it still ran when the launcher had ended

    @property
    def culprits(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.report["culprits"]
        return found


class Cluster:
    """Three hosts of two ranks each."""

    _numbers = itertools.count()

    def __init__(self, bed: Bed, slurm: bool = True) -> None:
        self.bed = bed
        self.folder = bed.folder
        self.slurm = Slurm(bed, cpus=4 * AT_ONCE) if slurm and not slurms.missing() else None
        (self.folder / "hostfile").write_text("".join(f"{host} slots=2\n" for host in bed.hosts))

    def run(
        self,
        way: str,
        *words: str,
        light: bool = True,
        timeout: float = LATE,
        during: AbstractContextManager[None] | None = None,
        aborts: bool = True,
        **fault: Any,
    ) -> Told:
        """dist-test on all hosts to its end. Ranks are without torch if they are `light`: they start in a moment.
        mpirun ends all ranks when one has failed, if it `aborts`."""
        case = f"{os.getpid()}-{next(self._numbers)}"
        light_env = {"DIST_LIGHT": "1"} if light else {}
        env = {**ENV, "DIST_FAULT": json.dumps(fault), "DIST_CASE": case, **light_env}
        passed = ("DIST_FAULT", "DIST_CASE", "PYTHONPATH", *light_env)
        inner = [sys.executable, PROGRAM, "--backend", "gloo", "--json", "--timeout", str(timeout), *words]
        shell = ["/bin/sh", "-c", f'{fault.get("before", ":")}; exec "$@"', "sh", *inner]
        if way == "srun":
            if self.slurm is None:
                pytest.skip(f"no SLURM: {slurms.missing()}")
            env |= self.slurm.env | env
            env["SLURM_CONF"] = self.slurm.env["SLURM_CONF"]
            command = ["srun", "-N3", "-n6", "--ntasks-per-node=2", "--kill-on-bad-exit=0", *shell]
        elif way == "mpirun":
            command = [
                "mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", f"ssh -F {self.bed.ssh_config}",
                "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
                "--hostfile", str(self.folder / "hostfile"), "-x", "OMP_NUM_THREADS",
                *(word for name in passed for word in ("-x", name)), "-np", "6",
                *(() if aborts else ("--mca", "orte_abort_on_non_zero_status", "0")), *shell,
            ]  # fmt: skip
        else:
            # ssh passes no variables on, so the "python" of the hosts sets them.
            python = self.folder / f"python-{case}"
            program = Path(PROGRAM).with_name("dist_hosts.py")
            told = " ".join(shlex.quote(f"{name}={env[name]}") for name in passed)
            python.write_text(f'#!/bin/sh\nshift 2\nexec env {told} {sys.executable} {program} "$@"\n')
            python.chmod(0o755)
            inner += ["--remote-python", str(python)]
            command = [*inner, "--hosts", "h1,h2,h3", "--nproc", "2", "--ssh-config", self.bed.ssh_config]
        with during or nullcontext():
            done = self.bed.run("h1", *command, timeout=240, env=env)
        documents = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(documents) == 1, f"{done.stdout}\n{done.stderr}"
        return Told(json.loads(documents[0]), done.returncode, done.stderr, left(case))


def left(case: str) -> list[str]:
    """What of this dist-test still runs on any host, once what is under way had time to end."""
    found: list[str] = []
    for _ in range(100):
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if any(
                    name in words for name in ("dist_test.py", "cluster.dist", "dist_rank.py", "dist_hosts.py")
                ) and (f"DIST_CASE={case}".encode() in (folder / "environ").read_bytes().split(b"\0")):
                    found.append(words)
            except OSError:
                continue
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Those of the tests that are to run, under the name of the fault."""
    folder = tmp_path_factory.mktemp("dist")
    with Bed(3, folder / "bed") as bed, AtOnce(AT_ONCE) as found:
        cluster = Cluster(bed)
        for name in sorted(chosen(request, "name"), key=lambda name: name != "real ranks"):  # the longest first
            if name in FAULTS_OF_HOSTS:
                found.add(name, partial(on_own_hosts, folder / name.replace(" ", "-"), FAULTS_OF_HOSTS[name]))
            elif name in PLANTS:
                found.add(name, partial(cluster.run, PLANTS[name][0], **PLANTS[name][1]))
            elif name == "real ranks":
                found.add(name, partial(cluster.run, "srun", "--bytes", "4,64K", light=False, timeout=20, **REAL))
            else:
                found.add(name, partial(cluster.run, name, timeout=60))
        yield found


def on_own_hosts(folder: Path, run: Callable[[Cluster], Told]) -> Told:
    with Bed(3, folder) as bed:
        return run(Cluster(bed, slurm=False))


def needs(*programs: str) -> Any:
    import shutil

    lacking = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    return pytest.mark.skipif(bool(lacking), reason=f"not installed: {', '.join(lacking)}")


SRUN = needs("srun")
MPIRUN = needs("mpirun")


# Fault -> (how it is started, who is the culprit, a word of the reason)
PLANTS = {
    "worker stopped": ("srun", {"ranks": [3], "at": "all_reduce", "do": "stop"}, 3, "h2", "stopped"),
    "rank stopped": ("srun", {"ranks": [4], "at": "init", "do": "stop-parent"}, 4, "h3", "stopped"),
    "rank 0 stopped": ("srun", {"ranks": [0], "at": "init", "do": "stop-parent"}, 0, "h1", "stopped"),
    "rank 0 and its collector stopped": ("srun", {"ranks": [0], "at": "init", "do": "stop-all"}, 0, "", "stopped"),
    "worker killed": ("srun", {"ranks": [5], "at": "init", "do": "kill"}, 5, "h3", "SIGKILL"),
    "rank killed": ("srun", {"ranks": [2], "at": "facts", "do": "kill-parent"}, 2, "h2", "connection"),
    "rank leaves": ("mpirun", {"ranks": [1], "at": "import", "do": "exit"}, 1, "h1", "status 3"),
    # mpirun ends all ranks at once, before those that are left could say who was the first.
    "rank killed, mpirun": ("mpirun", {"ranks": [2], "at": "facts", "do": "kill-parent"}, 2, "h2", "connection"),
    "rank that never starts, mpirun": (
        "mpirun", {"before": "test $OMPI_COMM_WORLD_RANK = 5 && sleep 3 && exit 3"}, 5, "h3", "launcher ended the job",
    ),
    "exception": ("mpirun", {"ranks": [3], "at": "init", "do": "raise"}, 3, "h2", "ECC"),
    "rank behind": ("srun", {"ranks": [2], "at": "all_reduce", "do": "wait"}, 2, "h2", "did not get on"),
    "missing rank": ("srun", {"ranks": [5], "do": "never", "for": 2 * LATE}, 5, "h3", "never reported"),
    "missing rank 0": ("srun", {"ranks": [0], "do": "never", "for": 2 * LATE}, 0, "", "refused"),
    "two ranks on one GPU": (
        "srun",
        {"ranks": [2, 3], "facts": {"device": {"kind": "cuda", "index": 0, "name": "H100", "uuid": "GPU-1"}}},
        3, "h2", "same GPU as rank 2",
    ),
    "another NCCL": ("srun", {"ranks": [4, 5], "facts": {"nccl": "2.18.1"}}, 4, "h3", "NCCL is 2.18.1"),
    "another network plugin": (
        "srun", {"ranks": [2, 3], "facts": {"plugins": ["/opt/lib/libnccl-net.so"]}}, 2, "h2", "plugin",
    ),
    "wrong interface": (
        "srun", {"before": "test $(hostname) = h2 && export GLOO_SOCKET_IFNAME=lo"}, 2, "h2", "GLOO_SOCKET_IFNAME=lo",
    ),
    "worker stopped, ssh": ("ssh", {"ranks": [3], "at": "all_reduce", "do": "stop"}, 3, "h2", "stopped"),
    "two nodes with one node rank": (
        "mpirun",
        {"before": "test $(hostname) = h3 && export RANK=$((OMPI_COMM_WORLD_RANK - 2)) WORLD_SIZE=6 LOCAL_RANK=0"},
        2, None, "rank 2 is already taken by pid",
    ),
    "worlds of one": ("srun", {"before": "export RANK=0 WORLD_SIZE=1 LOCAL_RANK=0"}, 0, None, "world of its own"),
}  # fmt: skip
REAL = {"ranks": [3], "at": "all_gather bf16", "do": "stop"}


@SRUN
@MPIRUN
@pytest.mark.parametrize("name", ["srun", "mpirun", "ssh"])
def test_all_is_well(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert told.report["ok"] and told.culprits == [] and told.report["world"] == 6, told.report
    assert told.status == 0
    assert told.left == []


@SRUN
@MPIRUN
@pytest.mark.parametrize("name", PLANTS)
def test_names_the_culprit(runs: AtOnce, name: str) -> None:
    _, _, rank, host, word = PLANTS[name]
    told: Told = runs[name]
    culprit = told.culprits[0]
    assert culprit["rank"] == rank and host in (culprit["host"], None), told.culprits
    assert word in culprit["reason"]
    assert not told.report["ok"] and told.status != 0
    assert told.left == []


@SRUN
@pytest.mark.parametrize("name", ["real ranks"])
def test_real_ranks_with_gloo_between_hosts(runs: AtOnce, name: str) -> None:
    pytest.importorskip("torch")
    told: Told = runs[name]
    assert [(one["kind"], one["rank"], one["host"]) for one in told.culprits] == [("stopped", 3, "h2")]
    checks = told.report["evidence"]["ranks"]["3"]["checks"]
    assert "all_reduce bf16 4 B" in checks and "all_gather bf16 4 B" not in checks
    assert told.left == []


# Faults of a host itself: how they are made


def filtered(rule: str, host: str = "h3") -> Callable[[Cluster], Told]:
    """Only what comes in at the ports that the kernel gives out: the collector's are others, and ssh is let through."""

    def run(cluster: Cluster) -> Told:
        rules = f"table inet filter {{\nchain input {{\ntype filter hook input priority 0\n{rule}\n}}\n}}\n"
        done = cluster.bed.run(host, "nft", rules)
        assert done.returncode == 0, done.stderr
        return cluster.run("ssh")

    return run


def with_hosts(host: str, text: str, **fault: Any) -> Callable[[Cluster], Told]:
    """A host has another /etc/hosts."""

    def run(cluster: Cluster) -> Told:
        wrong = cluster.folder / "wrong-hosts"
        wrong.write_text(text)
        cluster.bed.run(host, "mount", "--bind", str(wrong), "/etc/hosts")
        # Ranks of a host that looks elsewhere give up when the collector does: it is not to be ended before its report.
        return cluster.run("mpirun", aborts=False, **fault)

    return run


def frozen(cluster: Cluster) -> Told:
    """Once a rank of it is at work."""
    if not cluster.bed.can_freeze():
        pytest.skip("this machine has no freezer cgroup")
    mark = cluster.folder / "mark"

    @contextmanager
    def freezes() -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not mark.exists() and not over.wait(0.05):
                pass
            cluster.bed.freeze("h3")

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            cluster.bed.thaw("h3")

    return cluster.run("ssh", during=freezes(), ranks=[4], at="init", do="mark", mark=str(mark))


FAULTS_OF_HOSTS: dict[str, Callable[[Cluster], Told]] = {
    "a filtered port": filtered("tcp dport 32768-60999 ct state new drop"),
    "a port that refuses": filtered("tcp dport 32768-60999 ct state new reject with tcp reset"),
    # As where the MTU is too large for the way: a connection can be made, and collectives would hang.
    "large packets": filtered("tcp dport 32768-60999 tcp sport 32768-60999 meta length > 1200 drop", "h2"),
    "own name is loopback": with_hosts("h2", "127.0.0.1 localhost\n127.0.1.1 h2\n10.99.0.1 h1\n10.99.0.3 h3\n"),
    "rank 0 elsewhere": with_hosts(
        "h3", "127.0.0.1 localhost\n10.99.0.77 h1\n10.99.0.2 h2\n10.99.0.3 h3\n", before="export MASTER_ADDR=h1"
    ),
    "frozen": frozen,
}


@needs("nft")
@pytest.mark.parametrize(("name", "word"), [("a filtered port", "filtered"), ("a port that refuses", "refused")])
def test_names_a_filtered_port(runs: AtOnce, name: str, word: str) -> None:
    told: Told = runs[name]
    assert [one["rank"] for one in told.culprits] == [4, 5]
    door = told.report["evidence"]["ranks"]["4"]["facts"]["door"][1]
    assert f"h1 -> h3 (10.99.0.3):{door} {word}" in told.culprits[0]["reason"]
    assert told.left == []


@needs("nft")
@pytest.mark.parametrize("name", ["large packets"])
def test_names_a_host_to_which_large_packets_do_not_come(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert {(one["kind"], one["host"]) for one in told.culprits} == {("unreachable", "h2")}, told.culprits
    assert "256 KiB do not come through" in told.culprits[0]["reason"] and "MTU" in told.culprits[0]["hint"]
    assert told.left == []


@MPIRUN
@pytest.mark.parametrize("name", ["own name is loopback"])
def test_names_a_host_whose_own_name_is_loopback(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert (told.culprits[0]["rank"], told.culprits[0]["host"]) == (2, "h2")
    assert "127.0.1.1, a loopback address" in told.culprits[0]["reason"]
    assert told.culprits[0]["hint"] == "export GLOO_SOCKET_IFNAME=eth0 on h2"
    assert told.left == []


@MPIRUN
@pytest.mark.parametrize("name", ["rank 0 elsewhere"])
def test_names_a_host_that_looks_for_rank_0_elsewhere(runs: AtOnce, name: str) -> None:
    """Each side says what it sees: nobody came from there, and there is nobody there."""
    told: Told = runs[name]
    assert [(one["rank"], one["host"], one["kind"]) for one in told.culprits] == [
        (4, "", "missing"),  # mpirun does not say where it put them
        (5, "", "missing"),
    ]
    assert "rank 4 on h3: no collector answers on the host of rank 0, h1 (10.99.0.77)" in told.err
    assert told.left == []


@pytest.mark.parametrize("name", ["frozen"])
def test_names_a_frozen_host(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert {one["rank"] for one in told.culprits} == {4, 5}
    assert "frozen" in told.culprits[0]["reason"]
    assert told.left == []
