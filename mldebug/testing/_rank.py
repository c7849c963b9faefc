"""One rank of a test under torchrun: runs the test by pytest, or a function of the test file, and writes the outcome.

    torchrun ... _rank.py FOLDER

A program of its own. FOLDER/job/call.json says what to run; the outcome goes into FOLDER/job/result-RANK.json.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

_GRACE = 1.0  # seconds for others to fail by themselves, before torchrun ends them because this one has


def main(folder: Path) -> int:
    rank, job = int(os.environ["RANK"]), folder / "job"
    (job / f"rank-{rank}.pid").write_text(str(os.getpid()))
    stacks = open(job / f"stacks-{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    call = json.loads((job / "call.json").read_text())
    sys.path[:] = call["path"]
    result = _run_test(call, folder, rank) if "test" in call else _run_function(call, job, rank)
    path = job / f"result-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").replace(path)
    if result["outcome"] != "failed":
        return 0
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline and len(list(job.glob("result-*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    return 1


class Recorder:
    """A plugin of the pytest in a rank: the options of the one that started it, and the reports of its one test."""

    def __init__(self, call: dict[str, Any], folder: Path, rank: int) -> None:
        self.call, self.folder, self.rank = call, folder, rank
        self.outcome, self.reason, self.problems, self.out = "", "", list[str](), ""
        self.group = False

    def pytest_configure(self, config: Any) -> None:
        for name, value in self.call["options"].items():
            setattr(config.option, name, value)
        config.option.mldebug_rank = self.folder
        config.option.basetemp = self.folder / f"tmp-{self.rank}"

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for node in {node for item in items for node in item.listchain()}:
            node.own_markers[:] = [one for one in node.own_markers if one.name not in ("flaky", "timeout")]

    def pytest_runtest_setup(self, item: Any) -> None:
        _begins(self.folder / "job", self.rank)
        if backend := self.call["backend"]:
            import torch.distributed as dist

            _check_backend(dist, backend)
            dist.init_process_group(backend)
            self.group = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        for title, text in report.sections:  # which repeats those of the phases before
            self.out += text if title.startswith("Captured std") and title.endswith(report.when) else ""
        if report.failed:
            where = "" if report.when == "call" else f"at {report.when}\n"
            self.problems.append(where + report.longreprtext)
        elif report.skipped:
            self.outcome = "skipped"
            self.reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call":
            self.outcome = self.outcome or "passed"
        if report.when == "teardown" and self.group and not self.problems:  # else a rank may be in a collective
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.problems.append(report.longreprtext)


def _check_backend(dist: Any, backend: str) -> None:
    """One sentence where torch would print a traceback of each rank."""
    import pytest

    for name in (part.rpartition(":")[2] for part in backend.split(",")):  # cpu:gloo,cuda:nccl
        if not dist.is_backend_available(name):
            have = [one for one in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(one)]
            pytest.fail(
                f"@pytest.mark.ranks(backend={backend!r}): this torch has no backend {name!r}, but {', '.join(have)}",
                pytrace=False,
            )


def _run_test(call: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    import pytest

    recorder = Recorder(call, folder, rank)
    with contextlib.suppress(SystemExit):
        status = pytest.main([call["test"], *call["arguments"]], plugins=[recorder])
        if not recorder.outcome and not recorder.problems:
            recorder.problems.append(f"pytest ended with status {int(status)} and ran no test: see what it wrote")
    outcome = "failed" if recorder.problems else recorder.outcome
    return _outcome(outcome, "\n".join(recorder.problems), recorder.reason, recorder.out)


def _run_function(call: dict[str, Any], job: Path, rank: int) -> dict[str, Any]:
    faulthandler.enable()
    try:
        function = _module(call["module"], call["file"])
        for name in call["function"].split("."):
            function = getattr(function, name)
        _begins(job, rank)
        args, kwargs = pickle.loads((job / "arguments.pickle").read_bytes())
        value = function(*args, **kwargs)  # type: ignore[operator]
        (job / f"value-{rank}.pickle").write_bytes(pickle.dumps(value))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return _outcome("failed", "it called sys.exit(0) and returned nothing")
        tb = error.__traceback__.tb_next if error.__traceback__ else None  # without our own frame
        return _outcome("failed", "".join(traceback.format_exception(type(error), error, tb)))
    return _outcome("passed")


def _begins(job: Path, rank: int) -> None:
    """The deadline runs from when all ranks have come here."""
    (job / f"began-{rank}").touch()


def _outcome(outcome: str, text: str = "", reason: str = "", out: str = "") -> dict[str, Any]:
    return {"outcome": outcome, "text": text, "reason": reason, "out": out}


def _module(name: str, file: str) -> ModuleType:
    """The test file by its name, so that its relative imports work; by its path where another file has that name."""
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        if module.__file__ and os.path.samefile(module.__file__, file):
            return module
    spec = importlib.util.spec_from_file_location(name.rpartition(".")[2], file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
