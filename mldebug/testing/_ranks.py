"""Ranks for a test: started by torchrun, waited for until a deadline, and their outcomes as one."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.testing._processes import MARK, clean_environment, end, processes, stacks_of

HERE = Path(__file__).resolve().parent
_TAIL = 40  # lines of a rank's stderr that are shown where it left nothing else
_SPY_SECONDS = 10.0
_START = 60.0  # seconds for torchrun to load torch and to start the ranks
_LINGER = 3.0  # seconds for what the ranks started to end after them
_RULE = 78
_OWN = re.compile(r"0x[0-9a-f]+|/tmp-\d+/")  # what differs between ranks that fail in the same way


@dataclass(frozen=True)
class RanksResult:
    """What came of ranks that all ended well: by rank, what the function returned (None for a script), and stdout
    and stderr."""

    values: tuple[Any, ...]
    out: tuple[str, ...]
    err: tuple[str, ...]


class Job:
    """N ranks under torchrun in a folder that holds all they write."""

    def __init__(self, folder: Path, ranks: int, timeout: float, env: Mapping[str, str] | None = None) -> None:
        if ranks < 1 or timeout <= 0:
            raise UsageError(f"{ranks} ranks for {timeout:g} s", "give 1 rank or more, and a timeout in seconds")
        self.folder, self.ranks, self.timeout = folder, ranks, timeout
        self._job = folder / "job"  # what the ranks and we tell each other
        self._job.mkdir()
        self._call: dict[str, Any] = {}  # until the ranks have begun with it
        self._env = dict(env or {})
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"

    def run_test(self, test: str, arguments: Sequence[str], options: Mapping[str, Any], backend: str | None) -> None:
        """Each rank runs this one test, `path::name`, by a pytest of its own."""
        call = {"test": test, "arguments": list(arguments), "options": dict(options), "backend": backend}
        self._start([str(HERE / "_rank.py"), str(self.folder)], call)

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Each rank calls this function, which is defined at the top of its module."""
        name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
        if module is None or not getattr(module, "__file__", None) or "<" in name or not name:
            raise UsageError(
                f"{function!r} cannot be found by a rank",
                "define it with def at the top of the test file, by its own name",
            )
        try:
            pickled = pickle.dumps((tuple(args), dict(kwargs)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UsageError(
                f"the arguments of {name} cannot be sent to ranks: {error}", "give what pickle can carry"
            ) from error
        (self._job / "arguments.pickle").write_bytes(pickled)
        call = {"function": name, "module": module.__name__, "file": module.__file__}
        self._start([str(HERE / "_rank.py"), str(self.folder)], call)

    def run_script(self, script: Path, args: Sequence[str]) -> None:
        """Each rank is this script."""
        if not script.exists():
            raise UsageError(f"there is no script {script}", "give its path from the current folder")
        self._start([str(script), *args], {})

    def result(self) -> RanksResult:
        """Wait; what each rank left. A rank that failed, or the deadline, fails the test."""
        status = self._wait()
        if status is None:
            where = self._where()
            end(self._process, self._mark)
            results = self._results()
            done = f"; {_ranks(list(results))} had ended" if results else ""
            failed = [rank for rank, one in results.items() if one["outcome"] == "failed"]
            lines = [f"{self.ranks} ranks did not end in {self.timeout:g} s{done}"]
            lines += [self._failure(results, failed)] if failed else []
            pytest.fail("\n".join([*lines, _title("where they are"), where]), pytrace=False)
        self._sweep()
        results = self._results()
        self._repeat(results)
        failed = [rank for rank, one in results.items() if one["outcome"] == "failed"]
        if status or failed:
            pytest.fail(self._failure(results, failed), pytrace=False)
        reasons = {rank: one["reason"] for rank, one in results.items() if one["outcome"] == "skipped"}
        if len(reasons) == self.ranks:
            pytest.skip(next(iter(reasons.values())))
        if reasons:
            others = _ranks([rank for rank in range(self.ranks) if rank not in reasons])
            why = next(iter(reasons.values()))
            pytest.fail(f"{_ranks(list(reasons))} skipped the test ({why}) and {others} did not", pytrace=False)
        return RanksResult(
            tuple(self._value(rank) for rank in range(self.ranks)),
            tuple(self._log(rank, "stdout") for rank in range(self.ranks)),
            tuple(self._log(rank, "stderr") for rank in range(self.ranks)),
        )

    def _start(self, command: list[str], call: dict[str, Any]) -> None:
        self._call, self._tests = call, "test" in call
        (self._job / "call.json").write_text(json.dumps({**call, "path": sys.path}))
        env = clean_environment(MLDEBUG_TESTING_PARENT=str(os.getpid()), **{MARK: self._mark})
        env.setdefault("OMP_NUM_THREADS", "1")
        if sys.platform == "linux":
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine, whatever its name resolves to
        launch = ["--nproc-per-node", str(self.ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        launch += ["--local-addr", "127.0.0.1", "--redirects", "3", "--log-dir", str(self._job / "logs")]
        with open(self._job / "torchrun.txt", "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "_launch.py"), str(self._job), *launch, *command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**env, **self._env}, text=True,
                start_new_session=True,
            )  # fmt: skip

    def _wait(self) -> int | None:
        """The status of torchrun, or None when the time is over, which runs from when the last rank has begun.

        Whatever else ends the wait, such as Ctrl-C, ends the ranks.
        """
        try:
            deadline = time.monotonic() + (_START if self._call else 0.0) + self.timeout
            while time.monotonic() < deadline:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return self._process.wait(0.1)
                if self._call and all((self._job / f"began-{rank}").exists() for rank in range(self.ranks)):
                    self._call, deadline = {}, time.monotonic() + self.timeout
            return None
        except BaseException:
            end(self._process, self._mark)
            raise

    def _sweep(self) -> None:
        """Nothing that the ranks started may outlive them."""
        deadline = time.monotonic() + _LINGER
        while (left := processes(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            stacks = stacks_of(left)
            end(self._process, self._mark)
            warnings.warn(
                pytest.PytestWarning(f"the ranks left processes behind, which were ended:\n{stacks}"), stacklevel=2
            )

    def _where(self) -> str:
        """The verdict of spy on the ranks; where it cannot read them, the stacks that they write themselves."""
        text, unread = "", list(range(self.ranks))
        try:
            from mldebug.hang import spy

            report = spy(pids=[self._process.pid], timeout=_SPY_SECONDS)
            text = report.text()
            read = {one["rank"] for one in report.evidence["ranks"] if one["status"] == "ok"}
            unread = [rank for rank in unread if rank not in read]
        except MldebugError as error:
            text = str(error)
        for rank in unread:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((self._job / f"rank-{rank}.pid").read_text()), signal.SIGUSR1)
        time.sleep(0.5 if unread else 0.0)
        for rank in unread:
            with contextlib.suppress(OSError):
                text += f"\n\nrank {rank}, by itself:\n" + (self._job / f"stacks-{rank}.txt").read_text()
        return text

    def _results(self) -> dict[int, dict[str, str]]:
        found = {}
        for rank in range(self.ranks):
            with contextlib.suppress(OSError):
                found[rank] = json.loads((self._job / f"result-{rank}.json").read_text())
        return found

    def _failure(self, results: dict[int, dict[str, str]], failed: list[int]) -> str:
        """Each failure once, with the ranks that had it; first those that died without a word."""
        try:
            codes = {int(rank): code for rank, code in json.loads((self._job / "end.json").read_text()).items()}
        except (OSError, ValueError):
            codes = {}
        died = [rank for rank in sorted(codes) if rank not in results]
        if failed or any(codes[rank] != -signal.SIGTERM for rank in died):
            died = [rank for rank in died if codes[rank] != -signal.SIGTERM]  # so does torchrun end the others
        blocks = []
        for rank in died:
            blocks += [_title(f"rank {rank}: {_how(codes[rank])}"), *self._tail(rank)]
        texts: dict[str, list[int]] = {}
        for rank in failed:
            texts.setdefault(_OWN.sub("", results[rank]["text"]), []).append(rank)
        for ranks in texts.values():
            blocks += [_title(_ranks(ranks)), results[ranks[0]]["text"].rstrip()]
        ended = [rank for rank in range(self.ranks) if rank not in results and rank not in died]
        if not died and not failed:
            log = (self._job / "torchrun.txt").read_text(errors="replace").splitlines()
            blocks += [_title("torchrun"), *log[-_TAIL:]]
        elif ended:
            blocks.append(f"{_ranks(ended)}: ended by torchrun after that")
        return "\n".join([f"{len(died) + len(failed)} of {self.ranks} ranks failed", *blocks])

    def _repeat(self, results: dict[int, dict[str, str]]) -> None:
        """What the ranks printed, as if printed by the test."""
        for rank in range(self.ranks):
            out = (results[rank]["out"] if rank in results else "") if self._tests else self._log(rank, "stdout")
            for line in out.splitlines():
                print(f"[rank {rank}] {line}")

    def _value(self, rank: int) -> Any:
        path = self._job / f"value-{rank}.pickle"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _log(self, rank: int, stream: str) -> str:
        paths = sorted((self._job / "logs").glob(f"*/attempt_0/{rank}/{stream}.log"))
        return paths[0].read_text(errors="replace") if paths else ""

    def _tail(self, rank: int) -> list[str]:
        """The end of its stderr, without the frames that are pytest's and ours."""
        lines = [line for line in self._log(rank, "stderr").splitlines() if line.strip()]
        return [line for line in lines if not re.search(r'File ".*/(_pytest|pluggy|mldebug/testing)/', line)][-_TAIL:]


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"died of {signal.Signals(-code).name}"
    return f"ended with status {code}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _title(text: str) -> str:
    return f" {text} ".center(_RULE, "-")
