"""collect() on live processes: who is a rank, what belongs to it, and what is kept of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang import collect
from mldebug.hang._watch_moves import stirred

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

WAIT = "print('ready', flush=True); import time; time.sleep(600)"
# A launcher: starts what it is given with RANK 0, 1, ... and waits.
LAUNCHER = """
import os, subprocess, sys
port, *programs = sys.argv[1:]
started = []
for rank, program in enumerate(programs):
    env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(programs)), MASTER_PORT=port)
    started.append(subprocess.Popen([sys.executable, "-c", program], env=env))
[process.wait() for process in started]
"""

Launch = Callable[..., int]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`launch("a", "b")` starts a launcher with a rank for each program, and waits until each has said a line."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*programs: str, port: str = "1234", env: dict[str, str] | None = None) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, port, *programs],
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        for _ in programs:
            assert process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_ranks_of_a_launcher(launch: Launch) -> None:
    launcher = launch(WAIT, WAIT)
    evidence = collect(pids=[launcher], interval=0.1)
    assert [(rank["rank"], rank["local_rank"], rank["world_size"]) for rank in evidence["ranks"]] == [
        (0, 0, 2),
        (1, 1, 2),
    ]
    for rank in evidence["ranks"]:
        assert rank["status"] == "ok"
        assert rank["state"] == "S"
        assert rank["job"].endswith(":1234")
        assert abs(rank["start"] - time.time()) < 60
        assert [len(sample["threads"]) for sample in rank["samples"]] == [1, 1]
        assert rank["children"] == []
    assert launcher not in [rank["pid"] for rank in evidence["ranks"]]


def test_a_pid_may_be_the_rank_itself(launch: Launch) -> None:
    ranks = collect(pids=[launch(WAIT, WAIT)], samples=1)["ranks"]
    (one,) = collect(pids=[ranks[1]["pid"]], samples=1)["ranks"]
    assert one["rank"] == 1


def test_found_by_name_and_not_by_another(launch: Launch) -> None:
    launch(WAIT + "  # very-odd-name", WAIT)
    (one,) = collect(name="very-odd-name", samples=1, user=str(os.geteuid()))["ranks"][:1]
    assert one["rank"] == 0
    nothing = collect(name="a name that no" + " process has", samples=1)
    assert nothing["ranks"] == []
    assert "was found" in nothing["notes"][0]


def test_of_two_jobs_the_larger_one(launch: Launch) -> None:
    word = "# two-jobs-here"
    launch(WAIT + word, port="1111")
    launch(WAIT + word, WAIT + word, port="2222")
    evidence = collect(name=word, samples=1)
    assert [rank["job"].rpartition(":")[2] for rank in evidence["ranks"]] == ["2222", "2222"]
    assert "another job is here too" in evidence["notes"][0]


def test_children_and_stopped_ones_are_under_their_rank(launch: Launch) -> None:
    child = "import time; time.sleep(600)"
    program = f"""
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
subprocess.Popen(["sleep", "600"])
ended = subprocess.Popen(["true"])
time.sleep(0.5)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    evidence = collect(pids=[launch(program)], interval=0.1)
    (rank,) = evidence["ranks"]
    assert rank["state"] == "T"
    assert rank["status"] == "ok"
    assert sorted((one["kind"], one["state"]) for one in rank["children"]) == [
        ("other", "S"),
        ("other", "Z"),
        ("python", "S"),
    ]
    python = next(one for one in rank["children"] if one["kind"] == "python")
    assert python["samples"][-1]["threads"]
    assert python["parent"] == rank["pid"]


def test_locks_have_holder_waiter_and_file(launch: Launch, tmp_path: Path) -> None:
    file = tmp_path / "lock"
    program = f"""
import fcntl, time
handle = open({str(file)!r}, "w")
print("ready", flush=True)
fcntl.flock(handle, fcntl.LOCK_EX)
time.sleep(600)
"""
    evidence = collect(pids=[launch(program, "import time; time.sleep(1)\n" + program)], samples=1)
    deadline = time.monotonic() + 10
    while not any(lock["waits"] for rank in evidence["ranks"] for lock in rank["locks"]):
        assert time.monotonic() < deadline
        evidence = collect(pids=[rank["pid"] for rank in evidence["ranks"]], samples=1)
    holder, waiter = (rank["locks"][0] for rank in evidence["ranks"])
    assert (holder["waits"], waiter["waits"]) == (False, True)
    assert holder["inode"] == waiter["inode"]
    assert holder.get("file") == str(file)


def test_only_harmless_locals_are_kept(launch: Launch) -> None:
    program = """
def train(step, token, flag):
    print("ready", flush=True)
    import time
    time.sleep(600)
train(7, "secret", True)
"""
    launcher = launch(program)
    time.sleep(0.1)

    def locals_of(everything: bool) -> dict[str, str]:
        (rank,) = collect(pids=[launcher], samples=1, locals=everything)["ranks"]
        frames = [frame for frame in rank["samples"][-1]["threads"][0]["frames"] if frame["name"] == "train"]
        return {local["name"]: local["repr"] for local in frames[0].get("locals", [])}

    kept = locals_of(False)
    assert (kept["step"], kept["flag"]) == ("7", "True")
    assert "token" not in kept
    assert "secret" in locals_of(True)["token"]


def test_mistakes() -> None:
    with pytest.raises(MldebugError, match="no process 999999999"):
        collect(pids=[999999999])
    with pytest.raises(UsageError, match="no user"):
        collect(user="nobody-has-this-name")


def test_a_launcher_under_srun_is_no_rank(launch: Launch) -> None:
    outer = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "77"}
    launcher = launch(WAIT, WAIT, env=outer)
    ranks = collect(pids=[launcher], samples=1)["ranks"]
    assert [(rank["rank"], rank["world_size"]) for rank in ranks] == [(0, 2), (1, 2)]
    assert launcher not in [rank["pid"] for rank in ranks]


def test_a_shell_around_a_rank_is_passed_by() -> None:
    env = {**os.environ, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "77"}
    shell = subprocess.Popen(
        ["sh", "-c", f'"{sys.executable}" -c "{WAIT}"; true'],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert shell.stdout is not None
    try:
        assert shell.stdout.readline()
        (rank,) = collect(pids=[shell.pid], samples=1)["ranks"]
        assert (rank["rank"], rank["local_rank"], rank["world_size"], rank["job"]) == (3, 1, 4, "77")
        assert rank["pid"] != shell.pid
        assert rank["status"] == "ok"
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()


def test_a_process_that_was_started_by_hand_is_rank_0_of_1() -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    alone = subprocess.Popen([sys.executable, "-c", WAIT], env=env, stdout=subprocess.PIPE)
    assert alone.stdout is not None
    try:
        assert alone.stdout.readline()
        (rank,) = collect(pids=[alone.pid], samples=1)["ranks"]
        assert (rank["rank"], rank["world_size"], rank["pid"]) == (0, 1, alone.pid)
    finally:
        alone.kill()
        alone.wait()
        alone.stdout.close()


def test_a_pid_with_nothing_to_look_at_says_what_it_is() -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    ended = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # leaves it a zombie
        (note,) = collect(pids=[sleeper.pid], samples=1)["notes"]
        assert note == f"process {sleeper.pid} (sleep) does not run Python, and neither does any below it"
        (note,) = collect(pids=[ended.pid], samples=1)["notes"]
        assert note == f"process {ended.pid} has ended, and is a zombie of process {os.getpid()}"
    finally:
        sleeper.kill()
        sleeper.wait()
        ended.wait()
    with pytest.raises(UsageError, match=f"there is no process {sleeper.pid}"):
        collect(pids=[sleeper.pid])


def test_what_a_thread_that_waits_for_data_does_is_seen() -> None:
    program = """
import socket, threading, time
here, there = socket.socketpair()
empty, other_end = socket.socketpair()
def send():
    while True:
        time.sleep(0.1)
        there.send(b"x")
threading.Thread(target=send, daemon=True).start()
print("ready", flush=True)
while True: ({reads}).recv(1)
"""
    for moves, reads in ((True, "here"), (False, "empty")):
        words = [sys.executable, "-c", program.replace("{reads}", reads)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            (rank,) = collect(pids=[process.pid], samples=3, interval=0.5)["ranks"]
        finally:
            process.kill()
            process.communicate()
        assert stirred(rank["samples"]) == moves
