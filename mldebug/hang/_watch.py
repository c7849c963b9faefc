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
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.report import Report
from mldebug.hang._evidence import SCHEMA, Evidence
from mldebug.hang._page import ENVIRONMENT, WATCHED, reclaim_folders, start_ticks
from mldebug.hang._report import SpyReport
from mldebug.hang._tree import Adopting, end_job
from mldebug.hang._verdict import Verdict
from mldebug.hang._watch_looks import Looks

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
    for the job's output. Signals are passed on to the job; it lives on where this process is killed (SIGKILL). Raises
    UsageError where the command cannot be started.

        report = watch(["torchrun", "--nproc-per-node", "4", "train.py"], timeout=60, on_hang=("spy", "kill"))
    """
    if not command:
        raise UsageError("no command to watch", "mldebug watch -- torchrun --nproc-per-node 4 train.py")
    if unknown := [action for action in on_hang if action not in ACTIONS]:
        raise UsageError(f"on_hang has no {unknown[0]!r}", f"it takes {' and '.join(ACTIONS)}")
    if timeout <= 0:
        raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "600 is usual for a long job")
    folder = _make_folder()
    try:
        with Adopting() as adopted:
            return _Watch(command, folder, timeout, "kill" in on_hang, on_alarm, stdout).run(adopted)
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
        self._command, self._folder = list(command), folder
        self._kill, self._on_alarm, self._stdout = kill, on_alarm, stdout
        self._looks = Looks(timeout)
        self._alarm: SpyReport | None = None

    def run(self, adopted: Adopting) -> WatchReport:
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
                killed = self._until_it_ends(job, adopted)
        except BaseException:
            end_job(job.pid, self._folder)
            job.wait()
            raise
        if killed:
            left = end_job(job.pid, self._folder)
        status = job.wait()
        adopted.bury(besides=job.pid)
        return WatchReport(
            self._found(status),
            128 - status if status < 0 else status,
            killed,
            tuple(left),
            time.monotonic() - began,
            self._looks.count,
        )

    def _until_it_ends(self, job: subprocess.Popen[bytes], adopted: Adopting) -> bool:
        """Wait for the end of the job, looking at it; returns whether it has to be ended."""
        next_look = time.monotonic() + self._looks.pause
        while job.poll() is None:
            adopted.bury(besides=job.pid)
            if time.monotonic() < next_look:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_TICK)
                continue
            if self._alarm is None:
                self._alarm = self._looks.look([job.pid])
                if self._alarm is not None:
                    if self._on_alarm is not None:
                        self._on_alarm(self._alarm)
                        adopted.spare()
                    if self._kill:
                        return True
            next_look = time.monotonic() + self._looks.pause
        return False

    def _found(self, status: int) -> SpyReport:
        if self._alarm is not None:
            return self._alarm
        how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        text, kind = f"The job ended ({how}); no hang was seen.", "unknown"
        if self._looks.slow is not None:
            text, kind = f"{text} On the way: {self._looks.slow.verdict.text}", "straggler"
        seen = self._looks.slow or self._looks.last
        evidence = seen.evidence if seen is not None else _nothing()
        return SpyReport(Verdict(False, kind, (), text, "high", ("process state",)), evidence)


def _nothing() -> Evidence:
    return {"schema": SCHEMA, "time": time.time(), "hosts": [], "ranks": [], "notes": []}


@contextlib.contextmanager
def _passing_on(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """While entered, signals to us go to the job. Ctrl-C too; a second one ends the job with all that it started."""
    interrupts = 0

    def to_job(number: int, _frame: object) -> None:
        nonlocal interrupts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt
            if _from_terminal():  # the job has had it from there
                return
        with contextlib.suppress(OSError):
            job.send_signal(number)

    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            with contextlib.suppress(ValueError):  # not the main thread
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the job ignores it too
                    before[number] = signal.signal(number, to_job)
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def _from_terminal() -> bool:
    """Whether a Ctrl-C comes from the terminal, which sends it to all of the programs in front."""
    with contextlib.suppress(OSError):
        handle = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(handle) == os.getpgrp()
        finally:
            os.close(handle)
    return False


def _make_folder() -> str:
    """The folder that the agents of this job write to. Without one they do nothing, and the job is watched still."""
    reclaim_folders()
    for base in ("/dev/shm", tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            return tempfile.mkdtemp(prefix=f"{WATCHED}{os.getpid()}-{start_ticks('self')}-", dir=base)
    return f"/dev/null/{os.getpid()}"  # names the job's processes all the same
