"""`mldebug pairs --ping`: TCP between hosts in namespaces, with real faults.

Faults at which it waits are tried at once, each on hosts of its own; where rates count, one at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import PairsVerdict, load_pairs, pair_matrix
from mldebug.cluster.pairs._live import Options, measure
from mldebug.cluster.pairs._ping import unreached, wrong_name
from mldebug.core.errors import UsageError
from tests.at_once import AtOnce, chosen
from tests.bed import bed as beds
from tests.bed.bed import Bed

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "NCCL_", "GLOO_")
TABLE = "nft add table ip t; nft add chain ip t i '{ type filter hook input priority 0; }'; "
SSH = "nft add rule ip t i tcp dport 22 accept; nft add rule ip t i tcp sport 22 accept; "
CLEAR = "nft flush ruleset"
# On h3: what breaks it, what mends it, the verdict, and what the first reading has to say.
FAULTS = {
    "a filtered range": (
        TABLE + "nft add rule ip t i tcp dport 40000-50000 ct state new drop",
        CLEAR,
        ("node", "h3"),
        "what is sent to it: ports between 4",
    ),
    "one way": (
        TABLE + "nft add rule ip t i ip saddr 10.99.0.2 tcp dport 1024-65535 ct state new drop",
        CLEAR,
        ("path", "h2 -> h3"),
        "filtered (timeout)",
    ),
    "a partition": (
        TABLE + "nft add rule ip t i ip saddr 10.99.0.2 drop",
        CLEAR,
        ("path", "h2 <-> h3"),
        "no connection: filtered (timeout)",
    ),
    "losses": (
        TABLE + SSH + "nft add rule ip t i numgen random mod 100 '<' 8 drop",
        CLEAR,
        ("node", "h3"),
        "segments are sent again",
    ),
    "a slow host": (
        "tc qdisc add dev eth0 root tbf rate 50mbit burst 32k latency 50ms",
        "tc qdisc del dev eth0 root",
        ("node", "h3"),
        "what it sends: a stream reaches",
    ),
    "an MTU hole": (
        "ethtool -K eth0 gso off tso off gro off; "
        + TABLE
        + SSH
        + "nft add rule ip t i tcp dport != 22 meta length '>' 1400 drop",
        CLEAR + "; ethtool -K eth0 gso on tso on gro on",
        ("node", "h3"),
        "full-size segments never arrive",
    ),
    "a name that is loopback": (
        "sed 's/.* h3$/127.0.1.1 h3/' /etc/hosts >/run/hosts; mount --bind /run/hosts /etc/hosts",
        "umount /etc/hosts",
        ("node", "h3"),
        "its own name h3 leads to 127.0.1.1",
    ),
}


RATES = ("a slow host", "losses")
NO_HOSTS = beds.missing()
HOSTS = pytest.mark.skipif(bool(NO_HOSTS), reason=f"no hosts: {NO_HOSTS}")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with Bed(4, tmp_path_factory.mktemp("ping") / "bed") as found:
        yield found


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Of the faults at which it waits: the verdict, and the file that was written."""
    folder = tmp_path_factory.mktemp("faults")
    with AtOnce(len(WAITS)) as found:
        for name in chosen(request, "name"):
            found.add(name, partial(on_own_hosts, folder / name.replace(" ", "-"), WAITS[name]))
        yield found


def on_own_hosts(folder: Path, fault: Callable[[Bed], None]) -> tuple[dict[str, Any], Path]:
    with Bed(4, folder) as bed:
        fault(bed)
        try:
            verdict = ping(bed, "-o", str(folder / "ping.json"), status=1)["verdict"]
        finally:
            bed.thaw("h3")
    return verdict, folder / "ping.json"


def ping(bed: Bed, *words: str, status: int | None = None, hosts: str = "h1,h2,h3,h4") -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    command = (sys.executable, "-m", "mldebug", "pairs", "--ping", "--hosts", hosts, "--ssh-config", bed.ssh_config)
    done = bed.run(
        "h1", *command, "--json", "--timeout", "4", *words, timeout=200, env={**env, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == status or status is None, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def on(bed: Bed, host: str, command: str) -> None:
    done: subprocess.CompletedProcess[str] = bed.run(host, "/bin/sh", "-c", command)
    if done.returncode:
        pytest.skip(f"this fault cannot be made here: {done.stderr.strip()}")


@HOSTS
def test_healthy_hosts(bed: Bed, tmp_path: Path) -> None:
    out, table = tmp_path / "ping.json", tmp_path / "ping.csv"
    for _ in range(5):  # beside others that compute a host may be slow for once
        told = ping(bed, "-o", str(out))
        if told["verdict"]["kind"] == "none":
            break
    evidence = load_pairs(out)
    assert told["verdict"]["kind"] == "none" and told["pairs"] == {"ok": 12}, told["verdict"]
    assert told["ok"]
    assert evidence["gpus"] == bed.hosts and evidence["blame"] == []
    assert all(value and 0 < value < 1e5 for value in evidence["latency_us"])
    assert all(value and value > 0 for value in evidence["gbps"])
    report = pair_matrix(str(out))
    assert report.verdict.kind == "none" and "half of a round trip" in report.text()
    report.save(table)  # a spreadsheet has all that the verdict rests on
    assert pair_matrix(str(table)).verdict == report.verdict
    assert not [line for host in bed.hosts for line in bed.processes(host, "_ping_node")]


def level(path: Path, host: str = "") -> PairsVerdict:
    """The verdict if all pairs (but those of `host`) had been equally fast: a busy machine is not what is tested."""
    evidence = load_pairs(path)
    for what in ("gbps", "latency_us"):
        evidence[what] = [
            value if value is None or host in (evidence["gpus"][src], evidence["gpus"][dst]) else 1.0
            for value, src, dst in zip(evidence[what], evidence["src"], evidence["dst"], strict=True)
        ]
    return pair_matrix(evidence).verdict


def is_named(fault: str, told: dict[str, Any], verdict: PairsVerdict) -> None:
    _, _, (kind, culprit), reading = FAULTS[fault]
    assert culprit in told["culprits"] and reading in told["reading"], told
    assert (verdict.kind, verdict.culprits) == (kind, (culprit,)), verdict


@HOSTS
@pytest.mark.parametrize("fault", RATES)
def test_faults_of_rates_are_named(bed: Bed, fault: str, tmp_path: Path) -> None:
    breaks, mends, _, _ = FAULTS[fault]
    try:
        on(bed, "h3", breaks)
        verdict = ping(bed, "-o", str(tmp_path / "ping.json"), status=1)["verdict"]
    finally:
        bed.run("h3", "/bin/sh", "-c", mends)
    is_named(fault, verdict, level(tmp_path / "ping.json", "h3" if fault == "a slow host" else ""))


def freeze(bed: Bed) -> None:
    if not bed.can_freeze():
        pytest.skip("this machine has no freezer cgroup")
    bed.freeze("h3")


WAITS: dict[str, Callable[[Bed], None]] = {
    **{name: partial(on, host="h3", command=fault[0]) for name, fault in FAULTS.items() if name not in RATES},
    "unplugged": partial(Bed.blackhole, host="h3"),
    "frozen": freeze,
}


@HOSTS
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in RATES])
def test_faults_are_named(verdicts: AtOnce, name: str) -> None:
    verdict, out = verdicts[name]
    is_named(name, verdict, level(out))


@HOSTS
@pytest.mark.parametrize("name", ["unplugged"])
def test_an_unplugged_host(verdicts: AtOnce, name: str) -> None:
    verdict, out = verdicts[name]
    assert "h3" in verdict["culprits"] and "its port 22 at 10.99.0.3" in verdict["reading"], verdict
    assert level(out).culprits == ("h3",)


@HOSTS
@pytest.mark.parametrize("name", ["frozen"])
def test_a_frozen_host(verdicts: AtOnce, name: str) -> None:
    verdict, out = verdicts[name]
    assert "h3" in verdict["culprits"] and "frozen or starved" in verdict["reading"], verdict
    assert level(out).culprits == ("h3",)


def test_words() -> None:
    ports = [100, 200, 300, 29500]
    assert unreached(ports, {"200": "refused"}) == "port 200 refused, 3 others fine"
    assert unreached(ports, {"200": "x", "300": "x"}) == "ports between 200 and 300 (2 tried) x, 2 others fine"
    assert unreached(ports, dict.fromkeys(map(str, ports), "refused")) == "no connection: refused"
    facts = {"name": "a", "leads_to": ["10.0.0.1"], "wanted": {}, "cards": ["lo", "eth0"]}
    assert wrong_name(facts) == ""
    assert "127.0.1.1" in wrong_name({**facts, "leads_to": ["127.0.1.1"]})
    assert "leads nowhere" in wrong_name({**facts, "leads_to": []})
    assert wrong_name({**facts, "leads_to": ["127.0.1.1"], "wanted": {"GLOO_SOCKET_IFNAME": "eth0"}}) == ""
    assert "none of its interfaces" in wrong_name({**facts, "wanted": {"NCCL_SOCKET_IFNAME": "ib"}})
    assert wrong_name({**facts, "wanted": {"NCCL_SOCKET_IFNAME": "eth"}}) == ""  # NCCL takes the beginning of a name
    assert "loopback" in wrong_name({**facts, "wanted": {"NCCL_SOCKET_IFNAME": "lo"}})


def test_wrong_usage() -> None:
    for words, what in (
        ({"ping": True}, "two hosts at least"),
        ({"ping": True, "hosts": ("a", "b"), "nproc": 2}, "starts no ranks"),
        ({"ping": True, "hosts": ("a", "b"), "nodes_only": True}, "starts no ranks"),
    ):
        with pytest.raises(UsageError, match=what):
            measure(Options(**words))
