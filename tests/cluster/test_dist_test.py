"""`dist_test()` and `mldebug dist-test` with real ranks on this host, and what its parts promise."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster.dist import _net as net
from mldebug.cluster.dist import _where as where
from mldebug.cluster.dist._collector import Collector, Config
from mldebug.cluster.dist._dist_test import Options, run
from mldebug.cluster.dist._report import make_report
from mldebug.cluster.dist._wire import Gone, Wire, connects, listen, ports
from mldebug.core.errors import UsageError
from tests.at_once import AtOnce, chosen

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "programs" / "dist_test.py"
ALL = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send_recv",
)  # fmt: skip
QUICK = ("--nproc", "3", "--backend", "gloo", "--bytes", "4,64K", "--json")
Run = Callable[..., "subprocess.CompletedProcess[str]"]
pytestmark = pytest.mark.timeout(240)


def document(done: subprocess.CompletedProcess[str], status: int) -> dict[str, Any]:
    assert done.returncode == status, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["ok"] == (status == 0)
    return told


@pytest.mark.parametrize("name", ["all is well"])
def test_all_is_well_and_every_collective_was_tried(runs: AtOnce, run_python: Run, name: str) -> None:
    done, out = runs[name]
    told = document(done, 0)
    checks = set(told["evidence"]["ranks"]["1"]["checks"])
    lacking = {check for check, _ in told["evidence"]["left_out"]}
    for name in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send_recv",
    ):
        for dtype in ("fp32", "bf16"):
            tried = {f"{name} {dtype} 4 B", f"{name} {dtype} 64 KiB"} <= checks
            assert tried or f"{name} {dtype}" in lacking, f"{name} {dtype}"
    assert {"memory", "matmul", "barrier"} <= checks
    again = run_python(PROGRAM, "--from", out, env=ENV)
    assert again.returncode == 0 and again.stdout.startswith("dist-test: all is well: 3 ranks, gloo, ")
    assert len(again.stdout.splitlines()) == 2  # one line for the host


# Fault -> (kind, rank, a word of the reason, the phase)
FAULTS = {
    "stopped in a collective": (
        {"ranks": [2], "at": "all_reduce bf16 64", "do": "stop"}, "stopped", 2, "SIGSTOP", "all_reduce bf16 64 KiB",
    ),
    "stuck before a collective": (
        {"ranks": [0], "at": "broadcast fp32", "do": "wait"}, "behind", 0, "itself yet", "broadcast fp32 4 B",
    ),
    "stuck in its facts": ({"ranks": [1], "at": "facts", "do": "wait"}, "behind", 1, "did not get on", "facts"),
    "killed in a collective": (
        {"ranks": [1], "at": "all_gather", "do": "kill"}, "dead", 1, "SIGKILL", "all_gather fp32 4 B",
    ),
    "one wrong value": (
        {"ranks": [1], "do": "corrupt"}, "wrong contents", 1, "sent wrong data to ranks 0, 2", "broadcast fp32 4 B",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """What came of one dist-test with a fault."""

    report: dict[str, Any]
    seconds: float
    left: list[str]


def with_fault(run_torch: Run, *command: object, fault: dict[str, Any], **more: str) -> Told:
    case = f"{os.getpid()}-{next(NUMBERS)}"
    env = {**ENV, "DIST_FAULT": json.dumps(fault), "DIST_CASE": case, **more}
    began = time.monotonic()
    done = run_torch(*command, timeout=200, env=env)
    return Told(document(done, 1), time.monotonic() - began, left(case))


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, run_torch: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtOnce]:
    """Most of them wait, so a few run at once. The real timeout is the first, when not much else has begun."""
    pytest.importorskip("torch")
    with AtOnce(5) as found:
        for name in sorted(chosen(request, "name"), key=lambda name: name != "real timeout"):
            if name == "all is well":
                found.add(name, partial(all_is_well, run_torch, tmp_path_factory.mktemp("well") / "run.json"))
                continue
            if name == "classic":
                words = (*torchrun(name), CLASSIC, "--backend", "gloo", "--bytes", "4")
                found.add(name, partial(run_torch, *words, timeout=200, env=ENV))
                continue
            if name in FAULTS:
                words, fault, light = (PROGRAM, *QUICK, "--timeout", "10"), FAULTS[name][0], {}
            elif name == "real timeout":
                words, fault, light = (PROGRAM, *QUICK, "--timeout", "15"), {"ranks": [2], "do": "stop"}, LIGHT
            else:
                words = (*torchrun(name), PROGRAM, "--backend", "gloo", "--json", "--timeout", "10")
                fault, light = {"ranks": [0], "do": name}, LIGHT
            fault = {"at": "init", **fault}
            found.add(name, partial(with_fault, run_torch, *words, fault=fault, **light))
        yield found


def all_is_well(run_torch: Run, out: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    return run_torch(PROGRAM, *QUICK, "-o", out, timeout=120, env=ENV), out


@pytest.mark.parametrize("name", ["real timeout"])
def test_a_real_timeout_is_kept(runs: AtOnce, name: str) -> None:
    """With --timeout 15 a stopped rank is named some seconds later, and not after another time as long."""
    told: Told = runs[name]
    assert told.report["culprits"][0]["rank"] == 2 and told.left == []
    assert told.seconds > 15 and 15 <= told.report["seconds"] < 30


@pytest.mark.parametrize("name", FAULTS)
def test_names_the_rank(runs: AtOnce, name: str) -> None:
    _, kind, rank, word, phase = FAULTS[name]
    told: Told = runs[name]
    culprits = told.report["culprits"]
    assert [(one["kind"], one["rank"], one["phase"]) for one in culprits] == [(kind, rank, phase)]
    assert word in culprits[0]["reason"]
    assert told.left == []


@pytest.mark.parametrize("name", ["stop-parent", "stop-all"])
def test_a_stopped_rank_0_of_torchrun_is_named_and_not_left_behind(runs: AtOnce, name: str) -> None:
    told: Told = runs[name]
    culprit = told.report["culprits"][0]
    assert culprit["rank"] == 0 and "stopped" in culprit["reason"]
    assert told.left == []


def torchrun(name: str) -> tuple[str, ...]:
    """With an id, as jobs with --master-port 0 on one host have no other name of their own."""
    run = f"{name}-{os.getpid()}"
    return (
        "-m", "torch.distributed.run", "--nnodes", "1", "--master-port", "0", "--rdzv-id", run, "--nproc_per_node", "3",
    )  # fmt: skip


LIGHT = {"DIST_LIGHT": "1"}
NUMBERS = itertools.count()


CLASSIC = ROOT / "tools" / "torch-distributed-gpu-test.py"


@pytest.mark.parametrize("name", ["classic"])
def test_the_classic_command_line(runs: AtOnce, name: str) -> None:
    done = runs[name]
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        *(f"[{socket.gethostname()}:{rank}] is OK (global rank: {rank}/3)" for rank in range(3)),
        f"pt={version('torch')}",
        "dist-test: all is well: 3 ranks",
        "  " + HOST_LINE,
    ]


HOST_LINE = f"{socket.gethostname()}: ranks 0-2: fine; cpu"


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    process, case = waiting(tmp_path / "mark")
    process.send_signal(2)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "Traceback" not in err
    told = json.loads(out)  # the best result so far
    assert (
        told["ended"] == "interrupted" and told["evidence"]["ranks"]["1"]["phase"] == "init" and told["culprits"] == []
    )
    assert left(case) == []


def test_a_killed_launcher_leaves_no_ranks(tmp_path: Path) -> None:
    process, case = waiting(tmp_path / "mark")
    process.kill()
    process.communicate(timeout=100)
    assert left(case) == []


def waiting(mark: Path) -> tuple[subprocess.Popen[str], str]:
    """One whose rank 1 has come to its init, makes the file `mark`, and stays there."""
    case = f"{os.getpid()}-{next(NUMBERS)}"
    fault = {"ranks": [1], "at": "init", "do": "mark", "mark": str(mark)}
    env = {**os.environ, **ENV, **LIGHT, "PYTHONPATH": str(ROOT), "DIST_FAULT": json.dumps(fault), "DIST_CASE": case}
    words = [sys.executable, str(PROGRAM), *QUICK]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # what it said of its phase is on its way
    return process, case


ENV = {"OMP_NUM_THREADS": "1"}


def left(case: str) -> list[str]:
    """Processes of this dist-test that still run, once what is under way had time to end."""
    found: list[str] = []
    for _ in range(100):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
                ours = b"MLDEBUG_DIST_TEST=" in environment and f"DIST_CASE={case}".encode() in environment.split(b"\0")
                if ours or (path.parent / "comm").read_text().strip() == case:
                    found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        if not found:
            break
        time.sleep(0.1)
    return found


# The parts


@pytest.mark.parametrize(
    "options",
    [Options(backend="mpi"), Options(timeout=0), Options(start_timeout=-1), Options(nproc=0), Options(sizes=(0,))],
)
def test_wrong_usage(options: Options) -> None:
    with pytest.raises(UsageError):
        run(options)


def test_ports_are_the_same_for_all_ranks_and_differ_between_jobs() -> None:
    assert ports("slurm-7.0") == ports("slurm-7.0") != ports("slurm-7.1")
    assert all(21000 <= port < 29000 for port in ports("x")) and len(set(ports("x"))) == len(ports("x"))


def test_a_connection_says_how_it_failed() -> None:
    with listen(address="127.0.0.1") as server:
        port = server.getsockname()[1]
        found = connects([("127.0.0.1", port)], 1.0)
        assert not isinstance(found["127.0.0.1", port], str)
        found["127.0.0.1", port].close()  # type: ignore[union-attr]
    assert connects([("127.0.0.1", port)], 1.0) == {("127.0.0.1", port): "refused"}


def test_a_wire_gives_whole_lines_and_then_the_end() -> None:
    one, other = socket.socketpair()
    ours, theirs = Wire(one), Wire(other)
    other.send(b'{"t": "a"}\nno json\n[1]\n{"t"')
    assert ours.receive() == [{"t": "a"}]
    other.send(b': "b"}\n')
    theirs.close()
    assert ours.receive() == [{"t": "b"}]
    with pytest.raises(Gone):
        ours.receive()
    ours.close()


@pytest.mark.parametrize(
    "env, world, local, hosts",
    [
        ({"MASTER_ADDR": "node1"}, 8, 4, ("node1",)),
        ({}, 4, 4, ("127.0.0.1",)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "gpu[007-009,12]"}, 8, 2, ("gpu007",)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "a-1,b-[2-3]"}, 8, 2, ("a-1",)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2].dc"}, 8, 4, ("n1.dc",)),
        (
            {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.0.0.1,10.1.0.1:44"},
            8,
            4,
            ("10.0.0.1", "10.1.0.1"),
        ),
        ({"MASTER_ADDR": "x", "MLDEBUG_COLLECTOR": "node5:700"}, 8, 4, ("node5",)),
    ],
)
def test_where_the_collector_is(env: dict[str, str], world: int, local: int, hosts: tuple[str, ...]) -> None:
    assert where.find(env, "job", world, local).hosts == hosts


def test_a_job_that_does_not_say_where_rank_0_is_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        where.find({"PMI_RANK": "1", "PMI_SIZE": "4"}, "job", 4, 2)
    with pytest.raises(UsageError, match="no host:port"):
        where.find({}, "job", 4, 2, "node1")


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
TORCH = {"RANK": "1", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "env, word",
    [
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun was told of 1 rank, and srun started 4 tasks"),
        (
            {**SRUN, **TORCH, "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
            "all on this node",
        ),
        ({**TORCH, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, "each host itself"),
        ({**SRUN, **TORCH, "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, ""),
        ({**TORCH, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "localhost"}, ""),
        (SRUN, ""),
    ],
)
def test_worlds_apart(env: dict[str, str], word: str) -> None:
    found = where.apart(env)
    assert (word in found[0]) if word else found == ()


def test_the_plan_of_slurm() -> None:
    pytest.importorskip("ClusterShell")
    env = {**SRUN, "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
    assert where.plan(env, 5) == {"0": "n1", "1": "n1", "2": "n2", "3": "n2", "4": "n3"}
    assert where.plan(env, 4) == {}


@pytest.mark.parametrize(
    "setting, name, allowed",
    [
        ("", "eth0", True), ("eth", "eth1", True), ("=eth", "eth1", False), ("=eth1", "eth1", True),
        ("^docker,lo", "docker0", False), ("^docker", "lo", True), ("^=eth0", "eth01", True), ("ib,eth", "ens3", False),
    ],
)  # fmt: skip
def test_what_nccl_socket_ifname_means(setting: str, name: str, allowed: bool) -> None:
    assert net.allows("nccl", setting, name) is allowed


def test_the_collector_minds_no_strangers() -> None:
    """What connects to its port and speaks HTTP, sends no end of bytes, or is of another job, changes nothing."""
    listener = listen(address="127.0.0.1")
    port = listener.getsockname()[1]
    collector = Collector(Config(2, "job", timeout=1.0), listener, lambda seen: make_report(seen).to_dict())
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b'{"t": "beat", "states": 5}\n{"t": "hello"}\n{"t": 7}\n' * 100)
    strangers[2].sendall(
        b'{"t": "hello", "job": "other", "host": "h", "boot": "", "pid": 1, "world": 2, "ranks": [[0, 0, 1]]}\n'
    )
    report = collector.run()
    assert [(one["kind"], one["rank"]) for one in report["culprits"]] == [("missing", 0), ("missing", 1)]
    for stranger in strangers:
        stranger.close()


def test_importing_the_room_loads_no_torch(run_python: Run) -> None:
    source = (
        "import sys; from mldebug.cluster import dist_test; import mldebug.cluster.dist._rank\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(source).stdout == "False\n"
