"""What looks after the ranks of one host in a dist-test: starts them, tells the collector of them, and ends them.

It imports no torch, so it is there at once and is not held up by what holds a rank up. It is the process that torchrun,
srun or mpirun started (for one rank), the launcher itself, or what the launcher started over ssh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldebug.cluster.dist._local import boot_id
from mldebug.cluster.dist._where import Where
from mldebug.cluster.dist._wire import Gone, Message, Wire, connects
from mldebug.core.errors import MldebugError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.stacks import dump, process_state

# How a rank is started; the socket to this process is one of its arguments. Not `-m`: that would take modules from the
# folder where this happens to be called, such as the torch of a checkout of PyTorch.
PROGRAM = (  # Ctrl-C is for rank 0 or the launcher, and is not to come while modules load
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = [path for path in sys.path if path]; from mldebug.cluster.dist.{} import main; {}"
)
WORKER = (sys.executable, "-c", PROGRAM.format("_rank", "main()"))

_TICK = 0.05


@dataclass
class _Worker:
    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    wire: Wire | None
    phase: str = "start"


@dataclass
class Unheard(Exception):
    """The collector is missing, refuses or went silent; `why` is for people."""

    why: str


class Node:
    """`run()` returns the collector's report; raises Unheard where there is no collector to tell one."""

    def __init__(
        self,
        ranks: Sequence[tuple[int, int]],
        world: int,
        job: str,
        where: Where,
        timeout: float,
        local_world: int | None = None,
        apart: Sequence[str] = (),
    ) -> None:
        self.ranks = list(ranks)
        self.world = world
        self.job = job
        self.where = where
        self.timeout = timeout
        self.local_world = local_world
        self.apart = list(apart)  # what is wrong with the launcher's idea of the world, and a hint
        self.link: Wire | None = None
        self.told: Message = {}  # the collector's welcome
        self._workers: list[_Worker] = []
        self._stacks: list[tuple[int, str, str]] = []
        self._beat = 0.0
        self._shown = False  # whether the collector shows the report, as there may be no time to show it here

    def run(
        self,
        show: Callable[[dict[str, Any]], None] | None = None,
        interrupted: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """`show(report)` is called for rank 0, while the others are still there; `interrupted()` at Ctrl-C likewise."""
        with ends_on_sigterm():
            try:
                self._start()
                self._connect()
                report = self._look_after()
                if 0 in (rank for rank, _ in self.ranks) and not self._shown:
                    if show is not None:
                        show(report)
                    self._say({"t": "shown"})
                if report["ok"]:
                    self._let_end()
                self._await_bye()
                return report
            except KeyboardInterrupt:
                if interrupted is not None:
                    interrupted()
                raise
            except SystemExit:
                self._say({"t": "terminated"})
                raise
            finally:
                self._stop()

    @property
    def phase(self) -> str:
        """Where the first of its ranks is."""
        return self._workers[0].phase if self._workers else "start"

    # Starting

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parent.parent.parent)
        base = dict(os.environ)
        if self.local_world:
            base["LOCAL_WORLD_SIZE"] = str(self.local_world)
        base["PYTHONPATH"] = os.pathsep.join(filter(None, [root, base.get("PYTHONPATH")]))
        base.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without a name
        for rank, local_rank in self.ranks:
            env = {
                **base, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.world),
                "MLDEBUG_DIST_TEST": self.job,
            }  # fmt: skip
            try:
                process, wire = _start_rank(rank, env)
            except OSError as exc:
                why = (exc.strerror or str(exc)).lower()
                raise MldebugError(
                    f"cannot start rank {rank}: {why}", "check what `ulimit -a` and the cgroup allow, or start fewer"
                ) from exc
            self._workers.append(_Worker(rank, local_rank, process, wire))

    def _connect(self) -> None:
        """Find the collector of this job and be let in."""
        deadline = time.monotonic() + self.timeout
        why: dict[str, str] = {"": "its name cannot be resolved"}
        while True:
            found = connects(self.where.places(), min(2.0, max(0.2, deadline - time.monotonic())))
            wires = [(place, Wire(sock)) for place, sock in found.items() if not isinstance(sock, str)]
            why = {f"{place[0]}:{place[1]}": sock for place, sock in found.items() if isinstance(sock, str)} or why
            for place, wire in wires:
                if self.link is None and (answer := self._greet(wire)) is not None:
                    self.link, self.told = wire, answer
                    self._introduce(place)
                else:
                    wire.close()
            if self.link is not None:
                return
            if time.monotonic() > deadline:
                raise Unheard(self.where.lost(why, self.timeout))
            time.sleep(0.1)

    def _greet(self, wire: Wire) -> Message | None:
        message = {
            "t": "hello", "job": self.job, "host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(),
            "world": self.world, "local_world": self.local_world, "apart": self.apart,
            "ranks": [[one.rank, one.local_rank, one.process.pid] for one in self._workers],
        }  # fmt: skip
        with contextlib.suppress(Gone):
            wire.send(message)
            deadline = time.monotonic() + min(5.0, self.timeout)
            while answers := wire.wait(deadline):
                for answer in answers:
                    if answer.get("t") == "welcome":
                        return answer
        return None

    def _introduce(self, place: tuple[str, int]) -> None:
        self.timeout = self.told["config"]["timeout"]
        for one in self._workers:
            self._give(one, {"t": "config", "config": self.told["config"], "collector": list(place), "job": self.job})

    # Looking after

    def _look_after(self) -> dict[str, Any]:
        assert self.link is not None
        while True:
            self._listen_to_workers()
            try:
                for message in self.link.receive():
                    if message.get("t") == "end":
                        report: dict[str, Any] = message["report"]
                        self._shown = bool(message.get("shown"))
                        return report
                    self._obey(message)
            except Gone as exc:
                raise Unheard(f"its collector (pid {self.told['pid']} on {self.told['host']}) has gone: {exc}") from exc
            silent = time.monotonic() - self.link.heard
            if silent > self.timeout:
                time.sleep(1.5)  # all others here are to see by themselves that it is silent
                stopped = ", as it is stopped (SIGSTOP)" if self.told["pid"] in self._stopped_here() else ""
                host, pid = self.told["host"], self.told["pid"]
                raise Unheard(f"its collector (pid {pid} on {host}) said nothing for {silent:.0f} s{stopped}")
            if time.monotonic() - self._beat > 1.0:
                self._beat = time.monotonic()
                states = {str(one.rank): process_state(one.process.pid) for one in self._workers}
                self._say({"t": "beat", "states": states, "time": time.time()})
            while self._stacks:
                rank, text, why = self._stacks.pop()
                self._say({"t": "stack", "rank": rank, "stack": text, "why": why})
            time.sleep(_TICK)

    def _listen_to_workers(self) -> None:
        for one in self._workers:
            if one.wire is not None:
                try:
                    for message in one.wire.receive():
                        one.phase = message.get("phase", one.phase)
                        self._say({**message, "rank": one.rank})
                except Gone:
                    one.wire.close()
                    one.wire = None
            if one.wire is None and one.process.returncode is None and one.process.poll() is not None:
                self._say({"t": "ended", "rank": one.rank, "code": one.process.returncode})

    def _obey(self, message: Message) -> None:
        if message.get("t") == "go":
            for one in self._workers:
                self._give(one, message)
        elif message.get("t") == "stack":
            for one in self._workers:
                if one.rank == message["rank"]:
                    threading.Thread(target=self._read_stack, args=(one,), daemon=True).start()

    def _read_stack(self, one: _Worker) -> None:
        try:
            found = dump(one.process.pid, timeout=3.0)
            text, why = _stack_text(found.threads), found.why
        except MldebugError as exc:
            text, why = "", f"{exc.message}: {exc.hint}"
        self._stacks.append((one.rank, text, why or "it has no Python stack"))

    def _say(self, message: Message) -> None:
        if self.link is not None:
            with contextlib.suppress(Gone):  # noticed where it is read
                self.link.send(message)

    def _give(self, one: _Worker, message: Message) -> None:
        if one.wire is not None:
            with contextlib.suppress(Gone):
                one.wire.send(message)

    # Ending

    def _let_end(self) -> None:
        for one in self._workers:
            self._give(one, {"t": "end"})
        limit = time.monotonic() + 1.0
        while time.monotonic() < limit and any(one.process.poll() is None for one in self._workers):
            time.sleep(0.01)

    def _await_bye(self) -> None:
        """Rank 0 shows the report first: launchers end everything as soon as one rank has failed."""
        limit = time.monotonic() + 4.0
        assert self.link is not None
        with contextlib.suppress(Gone):
            while time.monotonic() < limit:
                if any(message.get("t") == "bye" for message in self.link.wait(limit)):
                    break

    def _stop(self) -> None:
        for one in self._workers:
            with contextlib.suppress(OSError):
                one.process.kill()
        for one in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(2.0)
            if one.wire is not None:
                one.wire.close()
        if self.link is not None:
            self.link.close()

    def _stopped_here(self) -> list[int]:
        """The collector and the processes of rank 0, where they are on this host and somebody stopped them."""
        if self.told["boot"] != boot_id():
            return []
        collector = int(self.told["pid"])
        if self.job not in _environment(collector):
            return []
        rank_zero = _parent(collector)  # that started it, and its worker
        workers = [pid for pid in _children(rank_zero) if pid != collector and self.job in _environment(pid)]
        known = [collector, *workers, *([rank_zero] if rank_zero > 1 else [])]
        return [pid for pid in known if process_state(pid) == "T"]

    def end_stopped(self) -> None:
        """End those: they would be left behind. Launchers end everything as soon as one has ended, so this is last."""
        for pid in self._stopped_here() if self.told else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _start_rank(rank: int, env: dict[str, str]) -> tuple[subprocess.Popen[bytes], Wire]:
    ours, theirs = socket.socketpair()
    with theirs:
        words = [*WORKER, "--rank", str(rank), "--fd", str(theirs.fileno())]
        # A rank's stdout is not ours: NCCL_DEBUG writes there, and our stdout carries the report.
        process = subprocess.Popen(
            words, env=env, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=_stderr(), stderr=_stderr()
        )
    return process, Wire(ours)


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, ValueError, IndexError):
        return 0


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except (OSError, ValueError):
        return []


def _stack_text(threads: Sequence[dict[str, Any]]) -> str:
    """The main thread, innermost frame first."""
    for thread in threads:
        if thread["name"] == "MainThread" or len(threads) == 1:
            return "\n".join(f"{frame['name']} ({frame['file']}:{frame['line']})" for frame in thread["frames"])
    return ""


def _stderr() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, AttributeError, ValueError):
        return subprocess.DEVNULL
