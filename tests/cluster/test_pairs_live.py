"""`mldebug pairs` with real workers (gloo): faults are named, all other pairs are measured, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import PairsVerdict, load_pairs, pair_matrix
from mldebug.cluster._hub import Agent, address_for
from mldebug.cluster.pairs._live import Options, measure
from mldebug.cluster.pairs._tasks import Task, evidence_of, tasks_of
from mldebug.core.errors import UsageError
from tests.bed import bed as beds
from tests.bed.bed import Bed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "pairs.py"
LAUNCHERS = ("SLURM_", "OMPI_", "PMI")
ENV = {"OMP_NUM_THREADS": "1"}
GLOO = ("--backend", "gloo", "--bytes", "64K", "--timeout", "10", "--json")
Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.timeout(240)
pytest.importorskip("torch")


def document(done: subprocess.CompletedProcess[str], status: int) -> dict[str, Any]:
    assert done.returncode == status, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def left() -> list[str]:
    """Node programs and their workers that still run, once what is under way had time to end."""
    found: list[str] = []
    for _ in range(60):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if "pairs_node" in words and state != "Z":
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


def test_all_pairs_both_ways(run_python: Run, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    done = run_python(PROGRAM, "--nproc", "4", *GLOO, "-o", out, timeout=120, env=ENV)
    assert done.returncode in (0, 1), done.stderr  # on a busy machine a pair may well be slow
    evidence = load_pairs(out)
    assert json.loads(done.stdout)["pairs"] == {"ok": 12}
    assert len(set(zip(evidence["src"], evidence["dst"], strict=True))) == 12
    assert all(value and value > 0 for value in evidence["gbps"])
    assert all(value and 0 < value < 1e6 for value in evidence["latency_us"])
    assert all(value and value > 0 for value in evidence["both_gbps"])
    assert set(evidence["round"]) == {1, 2, 3} and evidence["blame"] == []
    assert left() == []


def test_one_wedged_pair_and_one_dying_worker(run_python: Run, tmp_path: Path) -> None:
    """Both are named, and all other pairs are measured; sixteen ranks are below, on four hosts."""
    out = tmp_path / "pairs.json"
    faults = [{"gpu": 5, "peer": 6, "do": "stop"}, {"gpu": 3, "do": "kill"}]
    env = {**ENV, "PAIRS_FAULTS": json.dumps(faults)}
    told = document(run_python(PROGRAM, "--nproc", "8", *GLOO, "-o", out, timeout=200, env=env), 1)
    host = os.uname().nodename
    assert {f"{host}:3", f"{host}:5"} <= set(told["verdict"]["culprits"])
    readings = " ".join(found["reading"] for found in told["verdict"]["findings"])
    assert f"GPU {host}:3 is bad: its worker ended 3 times in a row: its worker was killed by SIGKILL" in readings
    assert f"GPU {host}:5 is bad: its process " in readings and "was stopped (SIGSTOP)" in readings
    bad = failed_pairs(out)
    assert bad.pop(frozenset((f"{host}:5", f"{host}:6"))) == {"hang"}
    assert bad == {frozenset((f"{host}:3", f"{host}:{other}")): {"dead"} for other in range(8) if other != 3}
    assert left() == []


def test_a_worker_that_dies_once_is_named_and_comes_back(run_python: Run, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    env = {**ENV, "PAIRS_FAULTS": json.dumps([{"gpu": 2, "peer": 0, "do": "kill", "once": str(tmp_path / "once")}])}
    told = document(run_python(PROGRAM, "--nproc", "4", *GLOO, "-o", out, timeout=120, env=env), 1)
    host = os.uname().nodename
    assert f"{host}:2" in told["verdict"]["culprits"] and level(out).culprits == (f"{host}:2",)
    assert failed_pairs(out) == {frozenset((f"{host}:0", f"{host}:2")): {"dead"}}
    assert left() == []


@pytest.mark.parametrize(
    "do, status", [("hang", {"hang"}), ("raise", {"error"}), ("corrupt", {"wrong"})]
)  # fmt: skip
def test_how_a_pair_can_end(run_python: Run, tmp_path: Path, do: str, status: set[str]) -> None:
    out = tmp_path / "pairs.json"
    fault = {"gpu": 1, "do": do} if do == "corrupt" else {"gpu": 1, "peer": 3, "do": do}
    env = {**ENV, "PAIRS_FAULTS": json.dumps([fault])}
    document(run_python(PROGRAM, "--nproc", "4", *GLOO, "-o", out, timeout=120, env=env), 1)
    host = os.uname().nodename
    bad = failed_pairs(out)
    if do == "corrupt":
        assert bad == {frozenset((f"{host}:1", f"{host}:{other}")): {"wrong"} for other in (0, 2, 3)}
        evidence = load_pairs(out)
        wrong = [src for src, one in zip(evidence["src"], evidence["status"], strict=True) if one == "wrong"]
        assert wrong == [1, 1, 1]  # what it receives is fine
        assert level(out).culprits == (f"{host}:1",)
    else:
        assert bad == {frozenset((f"{host}:1", f"{host}:3")): status}
        assert level(out).culprits == (f"{host}:1 <-> {host}:3",)
    assert left() == []


def start(*words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **ENV, "PYTHONPATH": str(ROOT), **(env or {})},
    )  # fmt: skip


def await_file(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{path} never came")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path: Path, number: int) -> None:
    """While one pair hangs. Ctrl-C gives the best result so far."""
    mark = tmp_path / "mark"
    faults = json.dumps([{"gpu": 0, "do": "hang", "once": str(mark)}])
    process = start("--nproc", "3", "--backend", "gloo", "--timeout", "60", "--json", env={"PAIRS_FAULTS": faults})
    await_file(mark)
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode in (128 + number, -number)
    if number == signal.SIGINT:
        assert "interrupted: what was measured until then is judged" in json.loads(out)["notes"], err
    assert left() == []


def test_under_torchrun(run_torch: Run, tmp_path: Path) -> None:
    out = tmp_path / "pairs.csv"
    launch = ("-m", "torch.distributed.run", "--nnodes", "1", "--master-port", "29691", "--nproc_per_node", "3")
    done = run_torch(*launch, PROGRAM, *GLOO, "-o", out, timeout=120, env=ENV)
    assert done.stdout.count('"schema"') == 1, done.stderr  # rank 0's
    evidence = load_pairs(out)
    assert evidence["status"] == ["ok"] * 6
    assert {name.rpartition(":")[2] for name in evidence["gpus"]} == {"0", "1", "2"}
    assert left() == []


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


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    if why := beds.missing():
        pytest.skip(f"no hosts: {why}")
    with Bed(4, tmp_path_factory.mktemp("pairs") / "bed") as found:
        yield found


def over_ssh(bed: Bed, *words: str, faults: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    env |= {**ENV, "PYTHONPATH": str(ROOT), "PAIRS_FAULTS": json.dumps(faults)}
    return bed.run("h1", sys.executable, str(PROGRAM), "--ssh-config", bed.ssh_config, *words, timeout=200, env=env)


def left_on(bed: Bed) -> list[str]:
    found: list[str] = []
    for _ in range(60):
        found = [line for host in bed.hosts for line in bed.processes(host, "pairs_node")]
        if not found:
            break
        time.sleep(0.1)
    return found


def test_sixteen_ranks_on_four_hosts(bed: Bed, tmp_path: Path) -> None:
    """One wedged pair and one dying worker: both named, all other pairs measured."""
    out = tmp_path / "pairs.json"
    faults = [{"gpu": 2, "peer": 13, "do": "stop"}, {"gpu": 7, "do": "kill"}]
    done = over_ssh(bed, "--hosts", "h1,h2,h3,h4", "--nproc", "4", *GLOO, "-o", str(out), faults=faults)
    told = document(done, 1)
    assert {"h1:2", "h2:3"} <= set(told["verdict"]["culprits"])
    bad = failed_pairs(out)
    assert bad.pop(frozenset(("h1:2", "h4:1"))) == {"hang"}
    others = [f"h{host}:{gpu}" for host in range(1, 5) for gpu in range(4) if (host, gpu) != (2, 3)]
    assert bad == {frozenset(("h2:3", other)): {"dead"} for other in others}
    assert left_on(bed) == []


def test_a_host_that_is_not_there(bed: Bed, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    words = ("--hosts", "h1,h2,h3,h9", "--nproc", "2", *GLOO, "-o", str(out))
    told = document(over_ssh(bed, *words, faults=[]), 1)
    assert level(out).culprits == ("h9",)
    assert any("h9 did not take part" in note and "resolve" in note for note in told["notes"]), told["notes"]
    assert {name for pair in failed_pairs(out) for name in pair if len(pair) == 2} >= {"h9:0", "h9:1"}
    assert told["pairs"]["ok"] == 30
    assert left_on(bed) == []


def test_nodes_against_nodes(bed: Bed, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"
    words = ("--hosts", "h1,h2,h3", "--nproc", "2", "--nodes-only", *GLOO, "-o", str(out))
    done = over_ssh(bed, *words, faults=[])
    assert done.returncode in (0, 1), done.stderr
    evidence = load_pairs(out)
    assert evidence["gpus"] == ["h1", "h2", "h3"] and evidence["status"] == ["ok"] * 6
    assert all(value and value > 0 for value in evidence["gbps"])
    assert left_on(bed) == []


def test_a_sample_of_four_hosts(bed: Bed, tmp_path: Path) -> None:
    """All pairs within hosts, the next host along the rails, one across: fewer pairs, and the dying worker is named."""
    out = tmp_path / "pairs.json"
    words = ("--hosts", "h1,h2,h3,h4", "--nproc", "2", "--sample", *GLOO, "-o", str(out))
    told = document(over_ssh(bed, *words, faults=[{"gpu": 3, "do": "kill"}]), 1)
    assert "h2:1" in told["verdict"]["culprits"], told["verdict"]
    evidence = load_pairs(out)
    pairs = {frozenset((src, dst)) for src, dst in zip(evidence["src"], evidence["dst"], strict=True)}
    assert 4 + 8 < len(pairs) < 28  # of 28: within hosts, along the rails, and some across
    inside = [pair for pair in pairs if len({evidence["gpus"][end].rpartition(":")[0] for end in pair}) == 1]
    assert len(inside) == 4
    assert {name for pair in failed_pairs(out) for name in pair} > {"h2:1"}
    assert all("h2:1" in pair for pair in failed_pairs(out))
    assert left_on(bed) == []
