"""Stacks of a Python process, read from outside by py-spy."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from typing import Any

from mldebug.core.errors import MldebugError


@dataclass(frozen=True)
class Stacks:
    """The threads of one process, or why there are none.

    `status` is ok, no-permission, gone, not-python or timeout; `why` has the reason and what to do about it. A thread
    is a plain dict: name, tid, active, gil and frames, innermost first, each with name, file, line and, where locals
    were asked for, locals (name, repr, arg).
    """

    status: str
    why: str = ""
    threads: list[dict[str, Any]] = field(default_factory=list)


def dump(
    pid: int, *, native: bool = False, locals: bool = False, nonblocking: bool = True, timeout: float = 5.0
) -> Stacks:
    """The stacks of process `pid`, within `timeout` seconds.

    By default the process is not paused: where that reads nonsense it is tried again, and at last with a pause of some
    milliseconds. `native` adds frames of C and C++ and pauses always. A process that was running is never left stopped,
    and one that is stopped already is never paused. Raises MldebugError where py-spy is not installed.

        for thread in dump(4711).threads:
            print(thread["name"], thread["frames"][0]["line"])
    """
    program = find_py_spy()
    deadline = time.monotonic() + timeout
    found = Stacks("gone", f"there is no process {pid}")
    pauses = [False, False, False, True] if nonblocking else [True, True]
    if native:
        pauses = [True]
    for pause in pauses:
        state = process_state(pid)
        if state in ("", "Z", "X"):
            return Stacks("gone", f"process {pid} has ended" + (" and waits for its parent (zombie)" if state else ""))
        if pause and state in "Tt":
            if native:
                return Stacks("timeout", f"process {pid} is stopped: its native stack cannot be read")
            pause = False  # it could not answer, and must not be let go by us
        left = deadline - time.monotonic()
        if left <= 0:
            break
        found = _run(program, pid, native=native, locals=locals, pause=pause, timeout=left)
        if found.status in ("ok", "no-permission", "gone", "timeout"):
            break
        time.sleep(0.02)
    return found


def find_py_spy() -> str:
    """The path of py-spy: beside this Python, or on PATH."""
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    for folder in folders:
        path = os.path.join(folder, "py-spy")
        if os.access(path, os.X_OK):
            return path
    path = shutil.which("py-spy") or ""
    if not path:
        raise MldebugError("py-spy is not installed, and it reads the stacks", "pip install py-spy")
    return path


def process_state(pid: int) -> str:
    """The letter that Linux has for what a process does (R, S, D, T, t, Z, X), or "" where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def permission_hint(pid: int) -> str:
    """What has to be done so that this process may read the memory of `pid`."""
    owner = _number_in(f"/proc/{pid}/status", r"^Uid:\s+(\d+)")
    if owner is not None and owner != os.geteuid() and os.geteuid() != 0:
        return f"it belongs to uid {owner}: run as that user, or as root"
    scope = _number_in("/proc/sys/kernel/yama/ptrace_scope", r"(\d+)")
    if scope == 3:
        return "ptrace is off until the next boot (kernel.yama.ptrace_scope=3): call mldebug.hang.enable() in the job"
    capability = "add the capability SYS_PTRACE to the container (docker run --cap-add SYS_PTRACE)"
    if os.geteuid() == 0:
        return f"{capability}, or call mldebug.hang.enable() in the job"
    if scope:
        return f"`sudo sysctl kernel.yama.ptrace_scope=0`, or run as root, or {capability}"
    return f"run as root, or {capability}, or call mldebug.hang.enable() in the job"


def _run(program: str, pid: int, *, native: bool, locals: bool, pause: bool, timeout: float) -> Stacks:
    words = [program, "dump", "--json", "--pid", str(pid)]
    words += ["--native"] if native else []
    words += ["--locals"] if locals else []
    words += [] if pause else ["--nonblocking"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Stacks("timeout", f"its stack was not read within {timeout:.0f} s")
    finally:
        if pause:
            _let_go(pid)
    if done.returncode == 0:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return Stacks("ok", threads=[_thread(thread) for thread in json.loads(done.stdout)])
        return Stacks("not-python", "py-spy gave no stacks that can be read")
    return _reason(pid, done.stderr)


def _let_go(pid: int) -> None:
    """Continue a process that was running before and is stopped now: a reader that is killed can leave it so."""
    for _ in range(3):
        if process_state(pid) != "T":
            return
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)


def _reason(pid: int, complaint: str) -> Stacks:
    text = complaint.strip()
    said = text.splitlines()[0].removeprefix("Error: ") if text else "py-spy failed and gave no reason"
    if re.search(r"permission denied|operation not permitted|os error (1|13)\b", text, re.I):
        return Stacks("no-permission", f"its stack may not be read: {permission_hint(pid)}")
    if process_state(pid) in ("", "Z", "X") or re.search(r"no such process|os error 3\b", text, re.I):
        return Stacks("gone", f"process {pid} has ended")
    if re.search(r"failed to find (a )?python|python version", text, re.I):
        return Stacks("not-python", "it does not run Python")
    return Stacks("not-python", f"no Python stack was found: {said[:200]}")


def _thread(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": raw["thread_name"] or "",
        "tid": raw.get("os_thread_id") or 0,
        "active": bool(raw["active"]),
        "gil": bool(raw["owns_gil"]),
        "frames": [_frame(frame) for frame in raw["frames"]],
    }


def _frame(raw: dict[str, Any]) -> dict[str, Any]:
    frame: dict[str, Any] = {"name": raw["name"], "file": raw["filename"], "line": raw["line"]}
    if raw.get("locals"):
        frame["locals"] = [
            {"name": local["name"], "repr": local["repr"] or "", "arg": bool(local["arg"])} for local in raw["locals"]
        ]
    return frame


def _number_in(path: str, pattern: str) -> int | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            match = re.search(pattern, stream.read(), re.M)
    except OSError:
        return None
    return int(match.group(1)) if match else None
