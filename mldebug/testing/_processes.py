"""Programs with a deadline: what they print, where they stand when it is over, and nothing left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from mldebug.core.errors import MldebugError
from mldebug.core.stacks import dump

MARK = "MLDEBUG_TESTING_JOB"  # in the environment of all that a test starts, so that it is found wherever it went
_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "TORCHELASTIC", "MASTER_", "GROUP_", "ROLE_", "PYTEST_XDIST")
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTEST_CURRENT_TEST")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what a launcher or pytest put there, and `more`."""
    kept = {name: text for name, text in os.environ.items() if name not in _RANK and not name.startswith(_LAUNCHERS)}
    return {**kept, **more}


def run_program(
    command: list[str],
    *,
    timeout: float,
    env: Mapping[str, str],
    cwd: str | Path | None = None,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end. One that does not end in time fails the test with the stacks of all its processes."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=cwd,
        env={**env, MARK: mark},
        start_new_session=True,
    )
    stacks = None
    try:
        out, err = process.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired:
        stacks = stacks_of(processes(mark) or [process.pid])
        end(process, mark)
        out, err = process.communicate()
    except BaseException:
        end(process, mark)
        raise
    if stacks is not None:
        pytest.fail(
            f"{command} did not end in {timeout:g} s\n--- stacks\n{stacks}\n--- stdout\n{out}\n--- stderr\n{err}",
            pytrace=False,
        )
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def processes(mark: str) -> list[int]:
    """The living processes that have this mark in their environment, and their descendants, from /proc."""
    parents: dict[int, int] = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            parents[int(folder.name)] = int(fields[1])
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    grew = True
    while grew:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grew = bool(below)
    return sorted(found)


def end(process: subprocess.Popen[str], mark: str) -> list[int]:
    """End a program and all it has started: asked first, killed a second later. Returns who was there."""
    there = processes(mark)
    _signal([process.pid] if not there and process.poll() is None else there, signal.SIGTERM)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and processes(mark):
        time.sleep(0.02)
    for _ in range(50):  # those that were about to start others
        left = processes(mark)
        _signal(left, signal.SIGKILL)
        if not left:
            break
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        process.wait()
    return there


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def stacks_of(pids: Iterable[int]) -> str:
    """The Python stacks of these processes, innermost frame last, or why one has none."""
    parts = []
    for pid in pids:
        parts.append(f"process {pid}: {_command(pid)}")
        try:
            found = dump(pid)
        except MldebugError as error:
            parts.append(f"  {error}")
            break
        if found.status != "ok":
            parts.append(f"  {found.why}")
        for thread in found.threads:
            parts.append(f"  thread {thread['name'] or thread['tid']}")
            parts += [f"    {one['file']}:{one['line']} {one['name']}" for one in reversed(thread["frames"])]
    return "\n".join(parts)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(words).strip()[:200]
    return "its command line is not known"
