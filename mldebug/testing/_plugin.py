"""The marks, fixtures and options of the plugin."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError
from mldebug.testing._processes import run_program
from mldebug.testing._ranks import Job, RanksResult

_TIMEOUT = 60.0  # seconds, of ranks and programs
_MARKS = (
    "ranks(n, timeout=60, backend=None): run the test in n ranks under torchrun; backend starts the process group too",
    "require_gpus(n=1): skip the test where fewer GPUs are visible",
    "slow: run with --run-slow, or RUN_SLOW=1, only",
)
# Of the pytest in a rank: it has one test to run, and files of its own.
_NOT_SENT = {
    "basetemp", "capture", "file_or_dir", "keyword", "markexpr", "plugins", "numprocesses", "dist", "tx", "maxfail",
    "maxprocesses", "distload", "inifilename", "rootdir", "collectonly", "runxfail", "lf", "failedfirst", "newfirst",
    "stepwise", "stepwise_skip", "deselect", "reruns", "override_ini", "xmlpath", "pastebin", "usepdb", "trace",
    "verbose", "timeout", "report_log", "setupshow", "setuponly", "setupplan", "help", "version", "debug", "durations",
}  # fmt: skip


def require_gpus(n: int = 1) -> pytest.MarkDecorator:
    """Skips a test where fewer than `n` GPUs are visible; says how many there are. Nothing is asked before it runs.

    @require_gpus(2)
    def test_two(): ...
    """
    return pytest.mark.require_gpus(n)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mldebug", "tests of training code")
    group.addoption("--run-slow", action="store_true", help="run tests that are marked slow (or RUN_SLOW=1)")
    group.addoption(
        "--test-seed",
        type=_seed,
        default=42,
        metavar="N",
        help="seed of random, numpy and torch for each test (42); or none",
    )


def pytest_configure(config: pytest.Config) -> None:
    served = hasattr(config.option, "reruns")  # by pytest-rerunfailures, which describes its mark itself
    for mark in (*_MARKS, *(() if served else ("flaky(reruns=1): run again, by pytest-rerunfailures",))):
        config.addinivalue_line("markers", mark)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config.option, "reruns") and not _in_rank(config):
        for item in items:
            if item.get_closest_marker("flaky"):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked flaky, and what runs such tests again is not installed: "
                    "pip install pytest-rerunfailures"
                )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    config = item.config
    if _in_rank(config):
        return
    slow = item.get_closest_marker("slow")
    if slow and not (
        config.getoption("run_slow") or os.environ.get("RUN_SLOW", "0").lower() in ("1", "true", "yes", "on")
    ):
        pytest.skip("it is slow: --run-slow runs it")
    for mark in item.iter_markers("require_gpus"):
        wanted, there = _number(mark, 1), _gpus()
        if there < wanted:
            pytest.skip(f"it needs {wanted} GPU{'s'[: wanted > 1]}, and {there or 'none'} can be seen")
    ranks = item.get_closest_marker("ranks")
    if ranks is not None:
        item.fixturenames = []  # type: ignore[attr-defined]  # they are for the ranks
        item.runtest = functools.partial(_run_in_ranks, item, ranks)  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed and not _in_rank(item.config):
        seed = item.config.getoption("test_seed")
        lines = [] if seed is None else [f"seed {seed}: --test-seed {seed} gives the same numbers"]
        for path in {
            _folder(item),
            *(getattr(item, "funcargs", {}).get(name) for name in ("tmp_path", "shared_tmp_path")),
        }:
            if path is not None and path.exists():
                lines.append(
                    f"kept: {path}" + (f" ({', '.join(sorted(os.listdir(path))[:8])})" if any(path.iterdir()) else "")
                )
        report.sections.append(("mldebug.testing", "\n".join(lines)))
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Flaky tests that passed at last are told with the reason for which they had failed."""
    again = terminalreporter.stats.get("rerun", [])
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", [])}
    for nodeid in dict.fromkeys(report.nodeid for report in again):
        tries = [report for report in again if report.nodeid == nodeid]
        if nodeid in passed:
            why = getattr(getattr(tries[-1].longrepr, "reprcrash", None), "message", "") or str(tries[-1].longrepr)
            terminalreporter.write_line(
                f"flaky: {nodeid} passed at attempt {len(tries) + 1}, before that: {why.strip().splitlines()[0][:200]}"
            )


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., RanksResult]:
    """`run_ranks(what, *args, ranks=2, timeout=60, env={}, **kwargs)` runs N ranks under torchrun to their end.

    `what` is a function of the test file, called with `args` and `kwargs`, or the Path of a script, whose words are
    `args`. Returns a RanksResult. A rank that fails, or the deadline, fails the test, with the stacks of all ranks.

        def test_sum(run_ranks):
            assert run_ranks(train_step, 0.1, ranks=2).values[0] == 3.0
    """

    def run(
        what: Callable[..., Any] | Path,
        *args: Any,
        ranks: int = 2,
        timeout: float = _TIMEOUT,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> RanksResult:
        job = Job(_new_folder(request.node, tmp_path_factory), ranks, timeout, env)
        if isinstance(what, Path):
            job.run_script(what, [str(one) for one in args])
        else:
            job.run_function(what, args, kwargs)
        return job.result()

    return run


@pytest.fixture(scope="session")
def run_python(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """`run_python(what, *args, timeout=60, env={}, cwd=None, input=None)` runs a fresh Python to its end.

    `what` is a Path to a file, an option such as "-m" (then `args` go on), or source text. Returns what subprocess.run
    does, with text. A program that does not end in time fails the test with the stacks of all its processes, and
    nothing of it is left. What pytest can import from its root folder, it can.

        def test_help(run_python):
            assert run_python("-m", "mypackage", "--help").returncode == 0
    """

    def run(
        what: str | Path,
        *args: str | Path,
        timeout: float = _TIMEOUT,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        input: str | None = None,
    ) -> Any:
        head = [str(what)] if isinstance(what, Path) or what.startswith("-") else ["-c", what]
        path = os.pathsep.join(filter(None, [str(pytestconfig.rootpath), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **(env or {})}
        command = [sys.executable, *head, *map(str, args)]
        return run_program(command, timeout=timeout, env=environment, cwd=cwd, input=input)

    return run


@pytest.fixture
def shared_tmp_path(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Path:
    """An empty folder that all ranks of the test see under the same path; without ranks, the test's tmp_path.

    def test_checkpoint(shared_tmp_path):
        save(model, shared_tmp_path / "model.pt")
    """
    folder: Path | None = getattr(pytestconfig.option, "mldebug_rank", None)
    if folder is None:
        return Path(request.getfixturevalue("tmp_path"))
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    return shared


_FOLDER = pytest.StashKey[Path]()


def _run_in_ranks(item: pytest.Item, mark: pytest.Mark) -> None:
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    ranks = _number(mark, 2, "timeout", "backend")
    job = Job(_new_folder(item, factory), ranks, mark.kwargs.get("timeout", _TIMEOUT))
    test = f"{item.path}::{item.nodeid.partition('::')[2]}"
    job.run_test(test, _arguments(item.config), _options(item.config), mark.kwargs.get("backend"))
    job.result()
    if item.config.getini("tmp_path_retention_policy") != "all":
        shutil.rmtree(job.folder, ignore_errors=True)


def _arguments(config: pytest.Config) -> list[str]:
    """Of the pytest in a rank, after those that the project has in its settings."""
    words = ["--rootdir", str(config.rootpath), "-p", "mldebug.testing", "-p", "no:cacheprovider", "--runxfail"]
    words += ["-c", str(config.inipath)] if config.inipath else []
    words += ["-m", "", "-k", "", "--capture=fd", "-q", f"--import-mode={config.getoption('importmode')}"]
    words += [word for name in config.getoption("plugins") or () if not name.startswith("no:") for word in ("-p", name)]
    words += ["-n", "0"] if hasattr(config.option, "numprocesses") else []  # of pytest-xdist
    words += ["--timeout", "0"] if hasattr(config.option, "timeout") else []  # the ranks have a deadline together
    words += ["--reruns", "0"] if hasattr(config.option, "reruns") else []  # it would wait for the others for ever
    return words


def _options(config: pytest.Config) -> dict[str, Any]:
    """Options that a conftest.py or a plugin has, with the values that they have here."""
    found = {}
    for name, value in vars(config.option).items():
        if name not in _NOT_SENT:
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                continue
            found[name] = value
    return found


def _new_folder(item: pytest.Item, factory: pytest.TempPathFactory) -> Path:
    folder = factory.mktemp("ranks")
    item.stash[_FOLDER] = folder
    return folder


def _folder(item: pytest.Item) -> Path | None:
    return item.stash.get(_FOLDER, None)


def _in_rank(config: pytest.Config) -> bool:
    return getattr(config.option, "mldebug_rank", None) is not None


def _number(mark: pytest.Mark, default: int, *others: str) -> int:
    """The `n` of a mark; what it does not take fails the test, as pytest itself would pass over it."""
    value = mark.args[0] if mark.args else mark.kwargs.get("n", default)
    unknown = [*map(repr, mark.args[1:]), *(f"{name}=" for name in mark.kwargs if name not in ("n", *others))]
    if unknown:
        takes = ", ".join(["a number", *(f"{name}=" for name in others)])
        pytest.fail(f"@pytest.mark.{mark.name} does not take {', '.join(unknown)}: it takes {takes}", pytrace=False)
    if not isinstance(value, int) or value < 1:
        pytest.fail(f"@pytest.mark.{mark.name}({value!r}): give a number of 1 or more", pytrace=False)
    return value


def _gpus() -> int:
    from mldebug.core.device import find_device

    try:
        device = find_device()
    except MldebugError:
        return 0
    return 0 if device.kind == "cpu" else device.count()


def _seed(text: str) -> int | None:
    return None if text == "none" else int(text)
