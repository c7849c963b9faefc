"""dist-test over three hosts in namespaces, started by srun, mpirun, torchrun and ssh, with one fault each: the culprit
has to be named right, and first, and nothing may be left behind."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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


class Cluster:
    """Three hosts of two ranks each."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.slurm = None if slurms.missing() else Slurm(bed)
        (folder / "hostfile").write_text("".join(f"{host} slots=2\n" for host in bed.hosts))

    def launch(self, way: str, *words: str, light: bool = True, timeout: float = 5, **fault: Any) -> Launched:
        """Start dist-test on all hosts. Ranks are without torch if they are `light`: they start in a moment."""
        light_env = {"DIST_LIGHT": "1"} if light else {}
        env = {**ENV, "DIST_FAULT": json.dumps(fault), **light_env}
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
                "--hostfile", str(self.folder / "hostfile"), "-x", "DIST_FAULT", "-x", "PYTHONPATH",
                "-x", "OMP_NUM_THREADS", *(["-x", "DIST_LIGHT"] if light else []), "-np", "6", *shell,
            ]  # fmt: skip
        else:
            # ssh passes no variables on, so the "python" of the hosts sets them.
            python = self.folder / "python"
            program = Path(PROGRAM).with_name("dist_hosts.py")
            told = " ".join(shlex.quote(f"{name}={env[name]}") for name in ("DIST_FAULT", "PYTHONPATH", *light_env))
            python.write_text(f'#!/bin/sh\nshift 2\nexec env {told} {sys.executable} {program} "$@"\n')
            python.chmod(0o755)
            inner += ["--remote-python", str(python)]
            command = [*inner, "--hosts", "h1,h2,h3", "--nproc", "2", "--ssh-config", self.bed.ssh_config]
        return Launched(self.bed, command, env)

    def left(self) -> list[str]:
        """What of dist-test still runs on any host, once what is under way had time to end."""
        found: list[str] = []
        for _ in range(60):
            found = [
                f"{host}: {line}"
                for host in self.bed.hosts
                for line in self.bed.processes(host, "dist_test.py") + self.bed.processes(host, "_dist_")
                + self.bed.processes(host, "dist_rank.py")
            ]  # fmt: skip
            if not found:
                break
            time.sleep(0.1)
        return found


class Launched:
    def __init__(self, bed: Bed, command: list[str], env: dict[str, str]) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            bed.command("h1", *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def report(self, limit: float = 60) -> dict[str, Any]:
        """The document, once the launcher has ended."""
        try:
            out, self.err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            pytest.fail(f"did not end in {limit} s\n{out}\n{err}")
        self.seconds = time.monotonic() - self.began
        documents = [line for line in out.splitlines() if line.startswith("{")]
        assert len(documents) == 1, f"{out}\n{self.err}"
        document: dict[str, Any] = json.loads(documents[0])
        return document


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("dist")
    with Bed(3, folder / "bed") as bed:
        yield Cluster(bed, folder)


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
    "exception": ("mpirun", {"ranks": [3], "at": "init", "do": "raise"}, 3, "h2", "ECC"),
    "rank behind": ("srun", {"ranks": [2], "at": "all_reduce", "do": "wait"}, 2, "h2", "did not get on"),
    "missing rank": ("srun", {"ranks": [5], "do": "never", "for": 12}, 5, "h3", "never reported"),
    "missing rank 0": ("srun", {"ranks": [0], "do": "never", "for": 12}, 0, "", "refused"),
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


@SRUN
@MPIRUN
@pytest.mark.parametrize("way", ["srun", "mpirun", "ssh"])
def test_all_is_well(cluster: Cluster, way: str) -> None:
    launched = cluster.launch(way, timeout=15)
    report = launched.report()
    assert report["ok"] and report["culprits"] == [] and report["world"] == 6, report
    assert launched.process.returncode == 0
    assert cluster.left() == []


@SRUN
@MPIRUN
@pytest.mark.parametrize("name", PLANTS)
def test_names_the_culprit(cluster: Cluster, name: str) -> None:
    way, fault, rank, host, word = PLANTS[name]
    launched = cluster.launch(way, **fault)
    first = launched.report()
    culprit = first["culprits"][0]
    assert culprit["rank"] == rank and host in (culprit["host"], None), first["culprits"]
    assert word in culprit["reason"]
    assert not first["ok"] and launched.process.returncode != 0
    assert cluster.left() == []


@SRUN
def test_real_ranks_with_gloo_between_hosts(cluster: Cluster) -> None:
    pytest.importorskip("torch")
    launched = cluster.launch(
        "srun", "--bytes", "4,64K", light=False, timeout=15, ranks=[3], at="all_gather bf16", do="stop"
    )
    report = launched.report(120)
    assert [(one["kind"], one["rank"], one["host"]) for one in report["culprits"]] == [("stopped", 3, "h2")]
    checks = report["evidence"]["ranks"]["3"]["checks"]
    assert "all_reduce bf16 4 B" in checks and "all_gather bf16 4 B" not in checks
    assert cluster.left() == []


@pytest.mark.parametrize("rule, word", [("drop", "filtered"), ("reject with tcp reset", "refused")])
@needs("nft")
def test_names_a_filtered_port(cluster: Cluster, rule: str, word: str) -> None:
    """Only what comes in at the ports that the kernel gives out: the collector's are others."""
    rules = f"""
    table inet filter {{
        chain input {{
            type filter hook input priority 0
            tcp dport 32768-60999 ct state new {rule}
        }}
    }}
    """
    done = cluster.bed.run("h3", "nft", rules)
    assert done.returncode == 0, done.stderr
    try:
        launched = cluster.launch("ssh")
        report = launched.report()
    finally:
        cluster.bed.run("h3", "nft", "flush ruleset")
    assert [one["rank"] for one in report["culprits"]] == [4, 5]
    assert (
        f"h1 -> h3 (10.99.0.3):{report['evidence']['ranks']['4']['facts']['door'][1]} {word}"
        in report["culprits"][0]["reason"]
    )
    assert cluster.left() == []


def _with_hosts(cluster: Cluster, host: str, text: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run()` while a host has another /etc/hosts."""
    wrong = cluster.folder / "wrong-hosts"
    wrong.write_text(text)
    cluster.bed.run(host, "mount", "--bind", str(wrong), "/etc/hosts")
    try:
        return run()
    finally:
        cluster.bed.run(host, "umount", "/etc/hosts")


@MPIRUN
def test_names_a_host_whose_own_name_is_loopback(cluster: Cluster) -> None:
    text = "127.0.0.1 localhost\n127.0.1.1 h2\n10.99.0.1 h1\n10.99.0.3 h3\n"
    report = _with_hosts(cluster, "h2", text, lambda: cluster.launch("mpirun").report())
    assert (report["culprits"][0]["rank"], report["culprits"][0]["host"]) == (2, "h2")
    assert "127.0.1.1, a loopback address" in report["culprits"][0]["reason"]
    assert report["culprits"][0]["hint"] == "export GLOO_SOCKET_IFNAME=eth0 on h2"
    assert cluster.left() == []


@MPIRUN
def test_names_a_host_that_looks_for_rank_0_elsewhere(cluster: Cluster) -> None:
    """Each side says what it sees: nobody came from there, and there is nobody there."""
    text = "127.0.0.1 localhost\n10.99.0.77 h1\n10.99.0.2 h2\n10.99.0.3 h3\n"
    launched: list[Launched] = []

    def run() -> dict[str, Any]:
        launched.append(cluster.launch("mpirun", before="export MASTER_ADDR=h1"))
        return launched[0].report()

    report = _with_hosts(cluster, "h3", text, run)
    assert [(one["rank"], one["host"], one["kind"]) for one in report["culprits"]] == [
        (4, "", "missing"),  # mpirun does not say where it put them
        (5, "", "missing"),
    ]
    assert "rank 4 on h3: no collector answers on the host of rank 0, h1 (10.99.0.77)" in launched[0].err
    assert cluster.left() == []


def test_names_a_frozen_host(cluster: Cluster, tmp_path: Path) -> None:
    if not cluster.bed.can_freeze():
        pytest.skip("this machine has no freezer cgroup")
    mark = tmp_path / "mark"
    launched = cluster.launch("ssh", ranks=[4], at="init", do="mark", mark=str(mark))
    try:
        for _ in range(200):
            if mark.exists():
                break
            time.sleep(0.05)
        cluster.bed.freeze("h3")
        report = launched.report()
    finally:
        cluster.bed.thaw("h3")
    assert {one["rank"] for one in report["culprits"]} == {4, 5}
    assert "frozen" in report["culprits"][0]["reason"]
    assert cluster.left() == []
