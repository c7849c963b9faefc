"""watch(): run a job and say, while it runs, that it hangs, and why."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import Report
from mldebug.hang import _nccl as nccl
from mldebug.hang._collect import collect
from mldebug.hang._evidence import SCHEMA, Evidence
from mldebug.hang._judge import judge
from mldebug.hang._page import ENVIRONMENT
from mldebug.hang._report import SpyReport
from mldebug.hang._source import annotate
from mldebug.hang._tree import adopting, end_job
from mldebug.hang._verdict import Verdict

if TYPE_CHECKING:
    from mldebug.hang._evidence import Rank

ACTIONS = ("spy", "kill")
_TICK = 0.2  # seconds between two questions whether the job has ended


@dataclass(frozen=True)
class WatchReport(Report):
    """How a watched job went: `spy` is what was seen of it last, or when it hung; `status` its exit status.

    `ok` is true where no hang was seen and the job's own status is 0.

        report = watch(["torchrun", "--nproc-per-node", "4", "train.py"], timeout=300)
        print(report.text())
    """

    spy: SpyReport
    status: int
    killed: bool
    left: tuple[int, ...]  # processes of the job that could not be ended
    seconds: float
    looks: int

    @property
    def verdict(self) -> Verdict:
        return self.spy.verdict

    @property
    def ok(self) -> bool:
        return not self.verdict.hung and self.status == 0

    def to_dict(self) -> dict[str, Any]:
        watched = {
            "status": self.status,
            "killed": self.killed,
            "left": list(self.left),
            "seconds": round(self.seconds, 1),
            "looks": self.looks,
        }
        return {**self.spy.to_dict(), "ok": self.ok, "watch": watched}

    def text(self, color: bool = False, width: int = 80) -> str:
        if self.verdict.hung:
            return f"{self.spy.text(color, width)}\n\n{self.ending}"
        return self.ending

    @property
    def ending(self) -> str:
        """How the job ended, in a sentence."""
        if not self.verdict.hung:
            return f"no hang was seen in {self.seconds:.0f} s; the job ended with status {self.status}"
        if not self.killed:
            return f"the job went on after its hang, and ended with status {self.status}"
        if self.left:
            return f"the job could not be ended wholly; these processes stay: {', '.join(map(str, self.left))}"
        return "the job was ended, with all that it started"


def watch(
    command: Sequence[str],
    *,
    timeout: float = 300.0,
    on_hang: Sequence[str] = ("spy",),
    on_alarm: Callable[[SpyReport], None] | None = None,
    stdout: int | None = None,
) -> WatchReport:
    """Run `command`, a launcher or a program, and look at its ranks from time to time.

    It hangs where nothing moved in `timeout` seconds and the stacks say why; a job that is slow does not. Then
    `on_alarm` gets the report, once, and with "kill" in `on_hang` the job is ended with all that it started. Ranks get
    the agent (MLDEBUG_AGENT in their environment) where mldebug is installed in their Python. `stdout` is a descriptor
    for the job's output. Raises UsageError where the command cannot be started.

        report = watch(["torchrun", "--nproc-per-node", "4", "train.py"], timeout=60, on_hang=("spy", "kill"))
    """
    if not command:
        raise UsageError("no command to watch", "mldebug watch -- torchrun --nproc-per-node 4 train.py")
    if unknown := [action for action in on_hang if action not in ACTIONS]:
        raise UsageError(f"on_hang has no {unknown[0]!r}", f"it takes {' and '.join(ACTIONS)}")
    if timeout <= 0:
        raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "600 is usual for a long job")
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = tempfile.mkdtemp(prefix="mldebug-", dir=base)
    try:
        with adopting():
            return _Watch(command, folder, timeout, "kill" in on_hang, on_alarm, stdout).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Watch:
    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        timeout: float,
        kill: bool,
        on_alarm: Callable[[SpyReport], None] | None,
        stdout: int | None,
    ) -> None:
        self._command, self._folder, self._timeout = list(command), folder, timeout
        self._kill, self._on_alarm, self._stdout = kill, on_alarm, stdout
        self._looks: list[Evidence] = []
        self._count = 0
        self._last: SpyReport | None = None
        self._slow: SpyReport | None = None  # the last that named a straggler
        self._alarm: SpyReport | None = None

    def run(self) -> WatchReport:
        began = time.monotonic()
        environment = {**os.environ, ENVIRONMENT: self._folder}
        try:
            job = subprocess.Popen(self._command, env=environment, stdout=self._stdout)
        except OSError as exc:
            raise UsageError(
                f"cannot run {self._command[0]}: {(exc.strerror or str(exc)).lower()}", "check the command behind `--`"
            ) from exc
        killed, left = False, []
        try:
            with _passing_on(job):
                killed = self._until_it_ends(job)
        except BaseException:
            end_job(job.pid, self._folder)
            job.wait()
            raise
        if killed:
            left = end_job(job.pid, self._folder)
        status = job.wait()
        return WatchReport(
            self._found(status),
            128 - status if status < 0 else status,
            killed,
            tuple(left),
            time.monotonic() - began,
            self._count,
        )

    def _until_it_ends(self, job: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of the job, looking at it; returns whether it has to be ended."""
        pause = max(1.0, self._timeout / 2.2)  # three looks span the time
        next_look = time.monotonic() + pause
        while job.poll() is None:
            if time.monotonic() < next_look:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_TICK)
                continue
            if self._alarm is None and self._hangs(job.pid):
                if self._on_alarm is not None and self._alarm is not None:
                    self._on_alarm(self._alarm)
                if self._kill:
                    return True
            next_look = time.monotonic() + pause
        return False

    def _hangs(self, pid: int) -> bool:
        """One look; judged together with those before it, as far as the timeout reaches back."""
        evidence = self._look(pid, 1)
        if evidence is None or not any(rank["status"] == "ok" for rank in evidence["ranks"]):  # not seen: no reason
            self._looks.clear()
            return False
        self._looks.append(evidence)
        while len(self._looks) > 2 and self._looks[1]["time"] <= evidence["time"] - self._timeout:
            self._looks.pop(0)
        joined = _joined(self._looks)
        verdict = judge(joined)
        self._last = SpyReport(verdict, joined)
        if verdict.kind == "straggler" and not verdict.hung:
            self._slow = self._last
        if not verdict.hung or evidence["time"] - self._looks[0]["time"] < self._timeout * 0.9:
            return False
        closer = self._look(pid, 2)
        if closer is None:
            return False
        joined = _joined([*self._looks, closer])
        verdict = judge(joined)
        self._last = SpyReport(verdict, joined)
        if verdict.hung:
            self._alarm = self._last
        return verdict.hung

    def _look(self, pid: int, samples: int) -> Evidence | None:
        """What is seen now. A job that ends under our eyes is no error, and neither is one that cannot be seen."""
        with contextlib.suppress(MldebugError):
            evidence = collect(pids=[pid], samples=samples, timeout=max(5.0, self._timeout / 2))
            annotate(evidence)
            self._count += 1
            return evidence
        return None

    def _found(self, status: int) -> SpyReport:
        if self._alarm is not None:
            return self._alarm
        how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        text, kind = f"The job ended ({how}); no hang was seen.", "unknown"
        if self._slow is not None:
            text, kind = f"{text} On the way: {self._slow.verdict.text}", "straggler"
        seen = self._slow or self._last
        evidence = seen.evidence if seen is not None else _nothing()
        return SpyReport(Verdict(False, kind, (), text, "high", ("process state",)), evidence)


def _joined(looks: Sequence[Evidence]) -> Evidence:
    """The last evidence with the samples of the earlier ones in front, as far as the same processes were there."""
    last = looks[-1]
    ranks: list[Rank] = []
    for rank in last["ranks"]:
        before = [
            one
            for look in looks[:-1]
            for one in look["ranks"]
            if one["pid"] == rank["pid"] and abs(one["start"] - rank["start"]) < 1
        ]
        joined: Rank = {**rank, "samples": [sample for one in [*before, rank] for sample in one["samples"]]}
        progress: Any = {}
        for key in ("step", "heartbeat"):
            values = [value for one in [*before, rank] for value in one.get("progress", {}).get(key, [])]  # type: ignore[attr-defined]
            if values:
                progress[key] = values
        if progress:
            joined["progress"] = progress
        joined["nccl"], joined["gpus"] = nccl.joined([*before, rank])
        joined["children"] = [
            {
                **child,
                "samples": [
                    sample
                    for one in [*before, rank]
                    for other in one["children"]
                    if other["pid"] == child["pid"]
                    for sample in other["samples"]
                ],
            }
            for child in rank["children"]
        ]
        ranks.append(joined)
    sources: dict[str, Any] = {}
    for look in looks:
        sources.update(look.get("source", {}))
    return {**last, "ranks": ranks, "source": sources}


def _nothing() -> Evidence:
    return {"schema": SCHEMA, "time": time.time(), "hosts": [], "ranks": [], "notes": []}


@contextlib.contextmanager
def _passing_on(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """While entered, a request to end goes to the job; Ctrl-C reaches it from the terminal by itself."""

    def to_job(number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):
            job.send_signal(number)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, to_job)
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
