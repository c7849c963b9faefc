"""`mldebug pairs` with real workers (gloo): faults are named, all other pairs are measured, nothing is left behind."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import PairsVerdict, load_pairs, pair_matrix
from mldebug.cluster._hub import Agent, address_for
from mldebug.cluster.pairs._live import Options, measure
from mldebug.cluster.pairs._tasks import Task, evidence_of, tasks_of
from mldebug.core.errors import UsageError
from tests.at_once import AtOnce, chosen
from tests.bed import bed as beds
from tests.bed.bed import Bed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "pairs.py"
TORCHRUN = ROOT / "tests" / "forked.py"
LAUNCHERS = ("SLURM_", "OMPI_", "PMI")
ENV = {"OMP_NUM_THREADS": "1"}
GLOO = ("--backend", "gloo", "--bytes", "64K", "--timeout", "10", "--json")
Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.timeout(240)
pytest.importorskip("torch")


def left(case: str) -> list[str]:
    """Node programs of this run, and their workers, that still run on any host, once what is under way had time to
    end."""
    found: list[str] = []
    for _ in range(60):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                name = (path.parent / "comm").read_text().strip()
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if (name == case or f'"PAIRS_CASE": "{case}"' in words) and state != "Z":
                found.append(words)
        if not found:
            break
        time.sleep(0.1)
    return found


def failed_pairs(path: Path) -> dict[frozenset[str], set[str]]:
    """The pairs that did not end well, and how."""
    evidence = load_pairs(path)
    found: dict[frozenset[str], set[str]] = {}
    for src, dst, status in zip(evidence["src"], evidence["dst"], evidence["status"], strict=True):
        if status != "ok":
            found.setdefault(frozenset((evidence["gpus"][src], evidence["gpus"][dst])), set()).add(status)
    return found


def level(path: Path) -> PairsVerdict:
    """The verdict if all that ended well had been equally fast: a busy machine is not what is tested."""
    evidence = load_pairs(path)
    evidence["gbps"] = [None if value is None else 1.0 for value in evidence["gbps"]]
    return pair_matrix(evidence).verdict


# Each of them mostly waits, so a few run at once


@dataclass(frozen=True)
class Told:
    """What came of one run."""

    done: subprocess.CompletedProcess[str]
    out: Path
    left: list[str]

    def document(self, status: int) -> dict[str, Any]:
        assert self.done.returncode == status, self.done.stderr
        told: dict[str, Any] = json.loads(self.done.stdout)
        return told

    def evidence(self) -> Any:
        return load_pairs(self.out)


# Name -> (ranks, their faults)
HERE: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "a wedged pair and a dying worker": (8, [{"gpu": 5, "peer": 6, "do": "stop"}, {"gpu": 3, "do": "kill"}]),
    "hang": (4, [{"gpu": 1, "peer": 3, "do": "hang"}]),
    "raise": (4, [{"gpu": 1, "peer": 3, "do": "raise"}]),
    "corrupt": (4, [{"gpu": 1, "do": "corrupt"}]),
    "dies once": (4, [{"gpu": 2, "peer": 0, "do": "kill", "once": "once"}]),
    "all is well": (4, []),
}
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
# Name -> (words, the faults)
HOSTS: dict[str, tuple[tuple[str, ...], list[dict[str, Any]]]] = {
    "sixteen ranks": (
        ("--hosts", "h1,h2,h3,h4", "--nproc", "4"), [{"gpu": 2, "peer": 13, "do": "stop"}, {"gpu": 7, "do": "kill"}],
    ),
    "sample": (("--hosts", "h1,h2,h3,h4", "--nproc", "2", "--sample"), [{"gpu": 3, "do": "kill"}]),
    "no such host": (("--hosts", "h1,h2,h3,h9", "--nproc", "2"), []),
    "nodes": (("--hosts", "h1,h2,h3", "--nproc", "2", "--nodes-only"), []),
}  # fmt: skip
LONGEST = (*list(HOSTS)[:2], *HERE)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, run_torch: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Those of the tests that are to run, the longest first."""
    folder = tmp_path_factory.mktemp("pairs")
    names = sorted(chosen(request, "name"), key=lambda name: (*LONGEST, name).index(name))
    hosts = bool(set(names) & set(HOSTS)) and not beds.missing()
    bed = Bed(4, folder / "bed")
    with bed if hosts else nullcontext(), AtOnce(4) as found:
        for name in names:
            place = folder / name.replace(" ", "-")
            place.mkdir()
            if name in HOSTS:
                if hosts:
                    found.add(name, partial(over_ssh, bed, name, place))
            else:
                found.add(name, partial(under_torchrun if name == "torchrun" else here, run_torch, name, place))
        yield found


def environment(faults: list[dict[str, Any]], place: Path) -> tuple[str, dict[str, str]]:
    case = f"pn-{os.getpid()}-{next(NUMBERS)}"
    faults = [{**fault, "once": str(place / fault["once"])} if "once" in fault else fault for fault in faults]
    return case, {**ENV, "PAIRS_FAULTS": json.dumps(faults), "PAIRS_CASE": case}


def here(run_torch: Run, name: str, place: Path) -> Told:
    if name in SIGNALS:
        return interrupted(run_torch, SIGNALS[name], place)
    nproc, faults = HERE[name]
    case, env = environment(faults, place)
    done = run_torch(PROGRAM, "--nproc", str(nproc), *GLOO, "-o", place / "pairs.json", timeout=200, env=env)
    return Told(done, place / "pairs.json", left(case))


def interrupted(run_torch: Run, number: int, place: Path) -> Told:
    """Signalled while one pair hangs."""
    case, env = environment([{"gpu": 0, "do": "hang", "once": "mark"}], place)
    words = ("--nproc", "3", "--backend", "gloo", "--timeout", "60", "--json")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_torch, PROGRAM, *words, timeout=100, env={**env, "PAIRS_PID": str(place / "pid")})
        for _ in range(600):
            if (place / "mark").exists() or running.done():
                break
            time.sleep(0.1)
        assert (place / "mark").exists(), running.result()
        time.sleep(0.5)
        os.kill(int((place / "pid").read_text()), number)
        return Told(running.result(), place, left(case))


def under_torchrun(run_torch: Run, _: str, place: Path) -> Told:
    case, env = environment([], place)
    launch = ("-m", "torch.distributed.run", "--nnodes", "1", "--master-port", "29691", "--nproc-per-node", "3")
    words = (TORCHRUN, *launch, PROGRAM, *GLOO, "-o", place / "pairs.csv")
    return Told(run_torch(*words, timeout=120, env=env), place / "pairs.csv", left(case))


def over_ssh(bed: Bed, name: str, place: Path) -> Told:
    words, faults = HOSTS[name]
    case, more = environment(faults, place)
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    env |= {**more, "PYTHONPATH": str(ROOT)}
    out = place / "pairs.json"
    words = (str(PROGRAM), "--ssh-config", bed.ssh_config, *words, *GLOO, "-o", str(out))
    return Told(bed.run("h1", sys.executable, *words, timeout=200, env=env), out, left(case))


@pytest.mark.parametrize("name", ["all is well"])
def test_all_pairs_both_ways(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert told.done.returncode in (0, 1), told.done.stderr  # on a busy machine a pair may well be slow
    evidence = told.evidence()
    assert json.loads(told.done.stdout)["pairs"] == {"ok": 12}
    assert len(set(zip(evidence["src"], evidence["dst"], strict=True))) == 12
    assert all(value and value > 0 for value in evidence["gbps"])
    assert all(value and 0 < value < 1e6 for value in evidence["latency_us"])
    assert all(value and value > 0 for value in evidence["both_gbps"])
    assert set(evidence["round"]) == {1, 2, 3} and evidence["blame"] == []
    assert told.left == []


@pytest.mark.parametrize("name", ["a wedged pair and a dying worker"])
def test_one_wedged_pair_and_one_dying_worker(runs: AtOnce, name: str) -> None:
    """Both are named, and all other pairs are measured; sixteen ranks are below, on four hosts."""
    told: Told = runs[name]
    verdict = told.document(1)["verdict"]
    host = os.uname().nodename
    assert {f"{host}:3", f"{host}:5"} <= set(verdict["culprits"])
    readings = " ".join(found["reading"] for found in verdict["findings"])
    assert f"GPU {host}:3 is bad: its worker ended 3 times in a row: its worker was killed by SIGKILL" in readings
    assert f"GPU {host}:5 is bad: its process " in readings and "was stopped (SIGSTOP)" in readings
    bad = failed_pairs(told.out)
    assert bad.pop(frozenset((f"{host}:5", f"{host}:6"))) == {"hang"}
    assert bad == {frozenset((f"{host}:3", f"{host}:{other}")): {"dead"} for other in range(8) if other != 3}
    assert told.left == []


@pytest.mark.parametrize("name", ["dies once"])
def test_a_worker_that_dies_once_is_named_and_comes_back(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    host = os.uname().nodename
    assert f"{host}:2" in told.document(1)["verdict"]["culprits"] and level(told.out).culprits == (f"{host}:2",)
    assert failed_pairs(told.out) == {frozenset((f"{host}:0", f"{host}:2")): {"dead"}}
    assert told.left == []


@pytest.mark.parametrize("name, status", [("hang", {"hang"}), ("raise", {"error"}), ("corrupt", {"wrong"})])
def test_how_a_pair_can_end(runs: AtOnce, name: str, status: set[str]) -> None:
    told: Told = runs[name]
    told.document(1)
    host = os.uname().nodename
    bad = failed_pairs(told.out)
    if name == "corrupt":
        assert bad == {frozenset((f"{host}:1", f"{host}:{other}")): status for other in (0, 2, 3)}
        evidence = told.evidence()
        wrong = [src for src, one in zip(evidence["src"], evidence["status"], strict=True) if one == "wrong"]
        assert wrong == [1, 1, 1]  # what it receives is fine
        assert level(told.out).culprits == (f"{host}:1",)
    else:
        assert bad == {frozenset((f"{host}:1", f"{host}:3")): status}
        assert level(told.out).culprits == (f"{host}:1 <-> {host}:3",)
    assert told.left == []


@pytest.mark.parametrize("name", SIGNALS)
def test_nothing_is_left_behind(runs: AtOnce, name: str) -> None:
    """While one pair hangs. Ctrl-C gives the best result so far."""
    told: Told = runs[name]
    number = SIGNALS[name]
    assert told.done.returncode in (128 + number, -number)
    if number == signal.SIGINT:
        notes = json.loads(told.done.stdout)["notes"]
        assert "interrupted: what was measured until then is judged" in notes, told.done.stderr
    assert told.left == []


@pytest.mark.parametrize("name", ["torchrun"])
def test_under_torchrun(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert told.done.stdout.count('"schema"') == 1, told.done.stderr  # rank 0's
    evidence = told.evidence()
    assert evidence["status"] == ["ok"] * 6
    assert {name.rpartition(":")[2] for name in evidence["gpus"]} == {"0", "1", "2"}
    assert told.left == []


def test_wrong_usage() -> None:
    for words, what in (
        ({"nproc": 1, "backend": "gloo"}, "a pair needs two"),
        ({"nproc": 4, "nodes_only": True}, "needs several hosts"),
        ({"nproc": 4, "bytes": 3}, "bytes is 3"),
        ({"nproc": 4, "timeout": 0.0}, "timeout is 0"),
        ({"nproc": 4, "backend": "tcp"}, "no backend 'tcp'"),
        ({"sample": True, "nodes_only": True}, "do not go together"),
    ):
        with pytest.raises(UsageError, match=what):
            measure(Options(**words))


# Without workers


def test_the_tasks_of_two_hosts() -> None:
    names = ["a:0", "a:1", "b:0", "b:1"]
    turns = tasks_of(names, [[0, 1], [2, 3]], "pairs", False)
    assert [task.ends for task in turns[0]] == [("a:0", "a:1"), ("b:0", "b:1")]
    assert len({frozenset(task.gpus) for turn in turns for task in turn}) == 6
    (turn,) = tasks_of(names, [[0, 1], [2, 3]], "nodes", False)
    assert [(task.gpus, task.ends) for task in turn] == [((0, 1, 2, 3), ("a", "b"))]


def test_a_direction_that_was_over_counts() -> None:
    task = Task(1, (7, 9), ("a:0", "b:0"))
    task.begin(1)
    task.take(9, {"t": "part", "gbps": 2.5, "wrong": 0})
    task.close("hang", 1)
    evidence = evidence_of(["a:0", "b:0"], [task], [], [])
    assert list(zip(evidence["gbps"], evidence["status"], strict=True)) == [(2.5, "ok"), (None, "hang")]
    assert pair_matrix(evidence).verdict.culprits == ("b:0 -> a:0",)


def test_where_a_peer_is_found() -> None:
    class Sock:
        def getsockname(self) -> tuple[str, int]:
            return "::ffff:10.0.0.1", 5

    def agent(address: str, boot: str) -> Any:
        wire = type("Wire", (), {"sock": Sock()})()
        return Agent(wire, address=address, boot=boot)

    here, near, far = agent("127.0.0.1", "x"), agent("10.0.0.1", "x"), agent("10.0.0.2", "y")
    assert address_for(here, near) == "127.0.0.1"  # the same machine
    assert address_for(far, here) == address_for(far, near) == ""  # where the coordinator was found
    assert address_for(here, far) == "10.0.0.2"


# Over hosts in namespaces


NO_HOSTS = pytest.mark.skipif(bool(beds.missing()), reason=f"no hosts: {beds.missing()}")


@NO_HOSTS
@pytest.mark.parametrize("name", ["sixteen ranks"])
def test_sixteen_ranks_on_four_hosts(runs: AtOnce, name: str) -> None:
    """One wedged pair and one dying worker: both named, all other pairs measured."""
    told: Told = runs[name]
    assert {"h1:2", "h2:3"} <= set(told.document(1)["verdict"]["culprits"])
    bad = failed_pairs(told.out)
    assert bad.pop(frozenset(("h1:2", "h4:1"))) == {"hang"}
    others = [f"h{host}:{gpu}" for host in range(1, 5) for gpu in range(4) if (host, gpu) != (2, 3)]
    assert bad == {frozenset(("h2:3", other)): {"dead"} for other in others}
    assert told.left == []


@NO_HOSTS
@pytest.mark.parametrize("name", ["no such host"])
def test_a_host_that_is_not_there(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    document = told.document(1)
    assert level(told.out).culprits == ("h9",)
    assert any("h9 did not take part" in note and "resolve" in note for note in document["notes"]), document["notes"]
    assert {name for pair in failed_pairs(told.out) for name in pair if len(pair) == 2} >= {"h9:0", "h9:1"}
    assert document["pairs"]["ok"] == 30
    assert told.left == []


@NO_HOSTS
@pytest.mark.parametrize("name", ["nodes"])
def test_nodes_against_nodes(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    assert told.done.returncode in (0, 1), told.done.stderr
    evidence = told.evidence()
    assert evidence["gpus"] == ["h1", "h2", "h3"] and evidence["status"] == ["ok"] * 6
    assert all(value and value > 0 for value in evidence["gbps"])
    assert told.left == []


@NO_HOSTS
@pytest.mark.parametrize("name", ["sample"])
def test_a_sample_of_four_hosts(runs: AtOnce, name: str) -> None:
    """All pairs within hosts, the next host along the rails, one across: fewer pairs, and the dying worker is named."""
    told: Told = runs[name]
    verdict = told.document(1)["verdict"]
    assert "h2:1" in verdict["culprits"], verdict
    evidence = told.evidence()
    pairs = {frozenset((src, dst)) for src, dst in zip(evidence["src"], evidence["dst"], strict=True)}
    assert 4 + 8 < len(pairs) < 28  # of 28: within hosts, along the rails, and some across
    inside = [pair for pair in pairs if len({evidence["gpus"][end].rpartition(":")[0] for end in pair}) == 1]
    assert len(inside) == 4
    assert {name for pair in failed_pairs(told.out) for name in pair} > {"h2:1"}
    assert all("h2:1" in pair for pair in failed_pairs(told.out))
    assert told.left == []
