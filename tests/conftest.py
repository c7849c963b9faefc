"""What all tests share: the check that a test leaves nothing behind, and a way to run a program."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Before any test imports a library that looks at them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Started with `nohup ... &` this process ignores these, and so would every program that a test starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test that leaves a hook, a patched function, a trace function or an environment variable behind fails."""
    before = _snapshot()
    yield
    left = _differences(before, _snapshot())
    if left:
        pytest.fail("left behind by this test: " + "; ".join(left), pytrace=False)


@pytest.fixture
def process_state() -> SimpleNamespace:
    """The two halves of the check above, for the tests that it can fail."""
    return SimpleNamespace(snapshot=_snapshot, differences=_differences)


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_python(what, *args, timeout=60, env={}, cwd=None, input=None)` runs a fresh interpreter to its end.

    `what` is a Path to a file, an option such as "-m" (then `args` go on), or source text. A program that does not
    end in time fails the test with the stacks of all its processes.
    """
    return _run_python


def _run_python(
    what: str | Path,
    *args: str | Path,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input: str | None = None,
) -> subprocess.CompletedProcess[str]:
    head = [str(what)] if isinstance(what, Path) or what.startswith("-") else ["-c", what]
    command = [sys.executable, *head, *map(str, args)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **(env or {})},
        start_new_session=True,  # so that its children can be found, and ended, by their session
    )
    try:
        stdout, stderr = process.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired:
        stacks = _stacks(process.pid)
        _signal_group(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        pytest.fail(
            f"{command} did not end in {timeout} s\n--- stacks\n{stacks}\n--- stdout\n{stdout}\n--- stderr\n{stderr}",
            pytrace=False,
        )
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _stacks(session: int) -> str:
    """The stacks of a session's processes: by py-spy, else each process writes them to its stderr as it aborts."""
    py_spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if py_spy is None:
        _signal_group(session, signal.SIGABRT)
        return "py-spy is not installed: see stderr"
    dumps = [
        subprocess.run([py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=30, check=False)
        for pid in _processes(session)
    ]
    return "\n".join(dump.stdout or dump.stderr for dump in dumps)


def _processes(session: int) -> list[int]:
    """The members of a session, from /proc where there is one; else its leader alone."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return sorted(found) or [session]


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _snapshot() -> dict[str, Any]:
    """The process-wide state that watching code changes. torch is looked at only where a test has loaded it."""
    state: dict[str, Any] = {
        "builtins.print": builtins.print,
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
        "threading.settrace": threading.gettrace(),
        "threading.setprofile": threading.getprofile(),
        # pytest itself changes its variable between the phases of a test
        "os.environ": {
            # The compiler of torch sets variables of its own for good when it is first used.
            name: value
            for name, value in os.environ.items()
            if name != "PYTEST_CURRENT_TEST" and not name.startswith(("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_"))
        },
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        for module in ("torch.nn.modules.module", "torch.optim.optimizer"):
            for name, value in vars(sys.modules[module]).items():
                if name.startswith("_global_") and isinstance(value, dict):
                    state[f"{module}.{name}"] = dict(value)
        for owner, name in (
            (torch.amp.GradScaler, "step"),
            (torch.nn.Module, "__call__"),
            (torch.optim.Optimizer, "step"),
            (torch.Tensor, "backward"),
        ):
            state[f"{owner.__name__}.{name}"] = getattr(owner, name)
    return state


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed, in words. For state that appears only after (torch was loaded by the test) the default counts."""
    found = []
    for name, value in after.items():
        if name in before:
            old = before[name]
        elif isinstance(value, dict):
            old = {}
        else:  # a method of torch: its own as long as its code is torch's
            old = value if "/torch/" in value.__code__.co_filename.replace(os.sep, "/") else None
        if isinstance(value, dict):
            keys = sorted(str(key) for key in {*old, *value} if old.get(key) != value.get(key))
            if keys:
                found.append(f"{name}: {', '.join(keys)}")
        elif value is not old:
            found.append(name)
    return found
