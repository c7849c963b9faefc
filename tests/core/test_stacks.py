"""Stacks from outside: what is read, what is not and why, and that nothing is left stopped."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mldebug.core import stacks
from mldebug.core.errors import MldebugError
from mldebug.core.stacks import dump, process_state

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

SLEEPER = """
import time, threading
def inner(step):
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), name="helper", daemon=True).start()
inner(step=41)
"""


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_threads_frames_and_locals(sleeper: int) -> None:
    found = dump(sleeper, locals=True)
    assert found.status == "ok", found.why
    main = next(thread for thread in found.threads if thread["name"] == "MainThread")
    assert {thread["name"] for thread in found.threads} == {"MainThread", "helper"}
    assert [frame["name"] for frame in main["frames"]] == ["inner", "<module>"]
    assert {"name": "step", "repr": "41", "arg": True} in main["frames"][0]["locals"]
    assert main["tid"] == sleeper
    assert "locals" not in dump(sleeper).threads[0]["frames"][0]


@pytest.mark.parametrize("options", [{}, {"nonblocking": False}, {"native": True}])
def test_a_running_process_is_not_left_stopped(sleeper: int, options: dict[str, bool]) -> None:
    assert dump(sleeper, **options, timeout=20).status == "ok"
    assert process_state(sleeper) in "SR"


def test_a_reader_that_is_killed_leaves_nothing_stopped(sleeper: int, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\nkill -STOP "$4"; exec sleep 60\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    found = stacks._run(str(program), sleeper, native=False, locals=False, pause=True, timeout=0.5)
    assert found.status == "timeout"
    deadline = time.monotonic() + 2
    while process_state(sleeper) == "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_state(sleeper) in "SR"


def test_a_stopped_process_is_read_and_stays_stopped(sleeper: int) -> None:
    os.kill(sleeper, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process_state(sleeper) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert dump(sleeper).status == "ok"
    assert dump(sleeper, nonblocking=False).status == "ok"
    assert dump(sleeper, native=True).status == "timeout"
    assert process_state(sleeper) == "T"


def test_what_is_no_python_or_not_there() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert dump(process.pid).status == "not-python"
    finally:
        process.kill()
    time.sleep(0.1)
    assert dump(process.pid).status == "gone"  # a zombie
    process.wait()
    assert dump(process.pid).status == "gone"


def test_no_permission_says_what_to_do(sleeper: int, tmp_path: Path) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "Error: Operation not permitted (os error 1)" >&2; exit 1\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    found = stacks._run(str(program), sleeper, native=False, locals=False, pause=False, timeout=5)
    assert found.status == "no-permission"
    assert "SYS_PTRACE" in found.why


def test_py_spy_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MldebugError, match="py-spy is not installed"):
        dump(os.getpid())
