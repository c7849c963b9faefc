"""A dist-test that its launcher, or somebody, ends before it is over: what is known is said before it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mldebug.cluster.dist._collector import Config
from mldebug.cluster.dist._evidence import empty, new_rank
from mldebug.cluster.dist._judge import judge_dist_test
from mldebug.cluster.dist._wire import Wire, connects

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def beside(world: int, **more: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The collector as it runs beside rank 0, and its port."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output = {"json": True, "output": None, "quiet": False, "no_color": True}
    told = {
        "config": Config(world, "job", timeout=60.0).to_dict(), "ports": [port], "output": output, "verbose": False,
        "plan": {},
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "mldebug.cluster.dist._beside"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        yield process, port
    finally:
        process.kill()
        process.wait(10)


def join(port: int, rank: int, world: int) -> Wire:
    """What a rank says first, until it is welcome."""
    for _ in range(600):
        sock = connects([("127.0.0.1", port)], 1.0)["127.0.0.1", port]
        if not isinstance(sock, str):
            break
        time.sleep(0.05)
    assert not isinstance(sock, str)
    wire = Wire(sock)
    wire.send({
        "t": "hello", "job": "job", "host": f"h{rank}", "boot": str(rank), "pid": 100 + rank, "world": world,
        "local_world": 1, "apart": [], "ranks": [[rank, 0, 200 + rank]],
    })  # fmt: skip
    until = time.monotonic() + 30
    while time.monotonic() < until and "welcome" not in [one["t"] for one in wire.wait(until)]:
        pass
    return wire


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> dict[str, Any]:
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    report: dict[str, Any] = json.loads(out)
    return report


def test_who_left_is_named_by_a_collector_that_is_ended_itself() -> None:
    with beside(3) as (process, port):
        wires = [join(port, rank, 3) for rank in range(3)]
        wires[1].close()  # killed; mpirun then ends the others, the collector too
        report = end(process)
    assert [(one["rank"], one["kind"]) for one in report["culprits"]] == [(1, "lost")]
    assert not report["ok"] and report["ended"] == "terminated"


def test_mpirun_lets_ranks_go_on_before_it_ends_them() -> None:
    """Its SIGCONT comes a second before SIGTERM and SIGKILL, which come together."""
    with beside(2, OMPI_COMM_WORLD_SIZE="2") as (process, port):
        wires = [join(port, rank, 2) for rank in range(2)]
        wires[1].close()
        report = end(process, signal.SIGCONT)
        told = wires[0].wait(time.monotonic() + 5)
    assert [(one["rank"], one["kind"]) for one in report["culprits"]] == [(1, "lost")]
    assert [one["shown"] for one in told if one["t"] == "end"] == [True]  # so that it is not shown twice


def test_a_collector_that_was_stopped_goes_on() -> None:
    with beside(2, OMPI_COMM_WORLD_SIZE="2") as (process, port):
        wires = [join(port, rank, 2) for rank in range(2)]
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.3)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
        assert process.poll() is None
        report = end(process)
    assert report["ended"] == "terminated" and len(wires) == 2


def test_who_never_came_is_named_by_a_collector_that_is_ended_itself() -> None:
    with beside(3) as (process, port):
        wires = [join(port, rank, 3) for rank in (0, 2)]
        report = end(process)
        told = wires[1].wait(
            time.monotonic() + 5
        )  # the others hear it, and do not complain of a collector that is gone
    assert [(one["rank"], one["kind"]) for one in report["culprits"]] == [(1, "missing")]
    assert "when the launcher ended the job" in report["culprits"][0]["reason"]
    assert "end" in [one["t"] for one in told]


def test_a_job_that_is_ended_is_no_fault_of_a_rank() -> None:
    with beside(2) as (process, port):
        wires = [join(port, rank, 2) for rank in range(2)]
        for wire in wires:
            wire.send({"t": "terminated"})
        report = end(process)
    assert [(one["rank"], one["kind"]) for one in report["culprits"]] == [(None, "terminated")]


@pytest.mark.parametrize(
    ("times", "ended", "rank", "word"),
    [
        ([0.0, 3.0, 0.0], "a rank failed", 1, "was ended from outside (SIGTERM)"),  # somebody's kill
        ([3.4, 3.0, 3.4], "terminated", None, "rank 1 on h1 first"),  # and mpirun ends the others for it
        ([3.0, 3.01, 3.0], "terminated", None, "the job was ended from outside"),
    ],
)
def test_who_was_told_to_end_first(times: list[float], ended: str, rank: int | None, word: str) -> None:
    ranks = {str(one): {**new_rank(one, 0, f"h{one}", "b", 1, 2), "terminated": at} for one, at in enumerate(times)}
    culprits = judge_dist_test({**empty(3, "gloo", 15.0), "ranks": ranks, "ended": ended}).culprits
    assert [one.rank for one in culprits] == [rank]
    assert word in culprits[0].reason and culprits[0].hint
    assert ("first" in culprits[0].reason) == ("first" in word)
