"""What all tests share: the plugin for tests of training code, and the check that a test leaves nothing behind."""

from __future__ import annotations

import builtins
import compileall
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.with_torch import WithTorch

# Before any test imports a library that looks at them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two processes test at once and start others. Threads of torch that wait for one that has no core spin: small products
# then take ten times as long, and times that tests compare mean nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started with `nohup ... &` this process ignores these, and so would every program that a test starts and signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files that take long, the longest first: where several processes test, none of them begins one of these at the end,
# when the others have nothing left to do.
LONG = (
    "cluster/test_pairs_live.py",
    "perf/test_mamf.py",
    "ranks/test_first.py",
    "cluster/test_dist_test.py",
    "numerics/test_command.py",
    "cluster/test_comms.py",
    "numerics/test_compile.py",
    "ranks/test_emulate.py",
    "hang/test_remote_bed.py",
    "hang/test_watch.py",
    "hang/test_watchdog.py",
    "cluster/test_dist_bed.py",
    "ranks/test_breakpoint.py",
    "test_readme.py",
    "cluster/test_pairs_ping.py",
    "perf/test_memory_command.py",
    "cluster/test_dist_hurt.py",
    "cluster/test_comms_bed.py",
    "tiny/tokenizer/test_tokenizer.py",
    "perf/test_shapes.py",
    "perf/test_dataloader_command.py",
    "hang/test_agent.py",
    "numerics/test_bundle.py",
    "numerics/test_together.py",
    "numerics/test_html.py",
    "cli/test_overflow.py",
    "cluster/test_pairs_noise.py",
    "ranks/test_logs.py",
    "numerics/test_partition.py",
    "numerics/test_trainer_callback.py",
    "tracing/test_everything.py",
    "cluster/test_doctor_bed.py",
    "perf/test_mamf_search.py",
    "hang/test_live.py",
)
# Processes that a library starts once, for as long as this one lives.
LASTING = (
    "multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker",
    "tests/with_torch.py",
)  # fmt: skip
HERE = Path(__file__).parent

pytest_plugins = ["mldebug.testing"]  # run_python, run_ranks, the same seeds for each test


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # Hundreds of programs import the package, and where PYTHONDONTWRITEBYTECODE is set each would compile it.
        compileall.compile_dir(HERE.parent / "mldebug", quiet=2)
        config.option.loadscopereorder = False  # of xdist, which would begin with the files that have most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {HERE / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """A test that leaves a hook, a patched function, a trace function or an environment variable behind fails."""
    before = _snapshot()
    yield
    left = _differences(before, _snapshot())
    if left:
        pytest.fail("left behind by this test: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process_behind() -> Iterator[None]:
    """A file of tests that leaves a child process behind fails, and so does one that waits for none that has ended: in
    the same process other files follow, which would find it."""
    before = _children()
    yield
    deadline = time.monotonic() + 5.0
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        pytest.fail("left behind by this file: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def run_torch(pytestconfig: pytest.Config) -> Iterator[Callable[..., Any]]:
    """As `run_python`, for programs of which neither the start nor the imports are looked at, and which load torch:
    they are forked from a process that has loaded it."""

    def run(
        what: str | Path,
        *args: str | Path,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input: str | None = None,
    ) -> Any:
        head = [str(what)] if isinstance(what, Path) or what.startswith("-") else ["-c", what]
        path = os.pathsep.join(filter(None, [str(pytestconfig.rootpath), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **(env or {})}
        try:
            return python.run([*head, *map(str, args)], timeout=timeout, env=environment, cwd=cwd, input=input)
        except TimeoutError as late:
            pytest.fail(str(late), pytrace=False)

    with WithTorch() as python:
        yield run


@pytest.fixture
def process_state() -> SimpleNamespace:
    """The two halves of the check above, for the tests that it can fail."""
    return SimpleNamespace(snapshot=_snapshot, differences=_differences)


def _children() -> set[int]:
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):  # none where there is no /proc
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found


def _left(before: set[int]) -> list[str]:
    found = []
    for pid in sorted(_children() - before):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
            if not any(name in words for name in LASTING):
                found.append(f"process {pid}, {words[:200] or 'which has ended and was not waited for'}")
    return found


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
            # The compiler of torch sets variables of its own for good when it is first used; so does scikit-learn.
            name: value
            for name, value in os.environ.items()
            if name != "PYTEST_CURRENT_TEST"
            and not name.startswith(("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_"))
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
