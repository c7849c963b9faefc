"""`dist_test()` and `mldebug dist-test` with real ranks on this host, and what its parts promise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster import _dist_net as net
from mldebug.cluster import _dist_where as where
from mldebug.cluster._dist_collector import Collector, Config
from mldebug.cluster._dist_report import make_report
from mldebug.cluster._dist_test import Options, run
from mldebug.cluster._dist_wire import Gone, Wire, connects, listen, ports
from mldebug.core.errors import UsageError

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


def test_all_is_well_and_every_collective_was_tried(run_python: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    told = document(run_python(PROGRAM, *QUICK, "-o", tmp_path / "run.json", timeout=120, env=ENV), 0)
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
    again = run_python(PROGRAM, "--from", tmp_path / "run.json", env=ENV)
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


@pytest.mark.parametrize("name", FAULTS)
def test_names_the_rank(run_python: Run, name: str) -> None:
    pytest.importorskip("torch")
    fault, kind, rank, word, phase = FAULTS[name]
    env = {**ENV, "DIST_FAULT": json.dumps(fault)}
    told = document(run_python(PROGRAM, *QUICK, "--timeout", "6", timeout=120, env=env), 1)
    assert [(one["kind"], one["rank"], one["phase"]) for one in told["culprits"]] == [(kind, rank, phase)]
    assert word in told["culprits"][0]["reason"]
    assert left() == []


def test_a_real_timeout_is_kept(run_python: Run) -> None:
    """With --timeout 15 a stopped rank is named within 30 s of its stop."""
    env = {**ENV, "DIST_LIGHT": "1", "DIST_FAULT": json.dumps({"ranks": [2], "at": "init", "do": "stop"})}
    began = time.monotonic()
    told = document(run_python(PROGRAM, *QUICK, "--timeout", "15", env=env), 1)
    assert 15 < time.monotonic() - began < 30
    assert told["culprits"][0]["rank"] == 2 and left() == []


TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "1", "--master-port", "0", "--nproc_per_node", "3")


def test_the_classic_command_line(run_python: Run) -> None:
    pytest.importorskip("torch")
    tool = ROOT / "tools" / "torch-distributed-gpu-test.py"
    assert len(tool.read_text().splitlines()) <= 60
    done = run_python(*TORCHRUN, tool, "--backend", "gloo", "--bytes", "4", timeout=120, env=ENV)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "dist-test: all is well: 3 ranks",
        "  " + HOST_LINE,
    ]


HOST_LINE = f"{socket.gethostname()}: ranks 0-2: fine; cpu"


@pytest.mark.parametrize("do", ["stop-parent", "stop-all"])
def test_a_stopped_rank_0_of_torchrun_is_named_and_not_left_behind(run_python: Run, do: str) -> None:
    pytest.importorskip("torch")
    env = {**ENV, "DIST_LIGHT": "1", "DIST_FAULT": json.dumps({"ranks": [0], "at": "init", "do": do})}
    done = run_python(*TORCHRUN, PROGRAM, "--backend", "gloo", "--json", "--timeout", "5", timeout=120, env=env)
    culprit = document(done, 1)["culprits"][0]
    assert culprit["rank"] == 0 and "stopped" in culprit["reason"]
    assert left() == []


def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    env = {
        **os.environ,
        **ENV,
        "PYTHONPATH": str(ROOT),
        "DIST_LIGHT": "1",
        "DIST_FAULT": '{"ranks": [1], "at": "init", "do": "wait"}',
    }
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *QUICK], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    time.sleep(2.0)
    process.send_signal(2)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    told = json.loads(out)  # the best result so far
    assert (
        told["ended"] == "interrupted" and told["evidence"]["ranks"]["1"]["phase"] == "init" and told["culprits"] == []
    )
    assert left() == []


def test_a_killed_launcher_leaves_no_ranks() -> None:
    env = {
        **os.environ,
        **ENV,
        "PYTHONPATH": str(ROOT),
        "DIST_LIGHT": "1",
        "DIST_FAULT": '{"ranks": [1], "at": "init", "do": "wait"}',
    }
    process = subprocess.Popen([sys.executable, str(PROGRAM), *QUICK], env=env, stdout=subprocess.PIPE, text=True)
    time.sleep(2.0)
    process.kill()
    process.communicate()
    assert left() == []


WAITS = '{"ranks": [1], "at": "init", "do": "wait"}'
ENV = {"OMP_NUM_THREADS": "1"}


def left() -> list[str]:
    """Processes of ours that still run: they have the job's name in their environment, and that of who runs tests."""
    worker = f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER', '')}".rstrip("=").encode()
    found: list[str] = []
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environment = path.read_bytes()
                if b"MLDEBUG_DIST_TEST=" in environment and (worker in environment or b"=" not in worker):
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
        "import sys; from mldebug.cluster import dist_test; import mldebug.cluster._dist_rank\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(source).stdout == "False\n"
