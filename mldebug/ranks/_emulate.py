"""emulate(): a job of several nodes on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.report import Report
from mldebug.ranks import _emulate_guard
from mldebug.ranks._emulate_nodes import Plan, plan
from mldebug.ranks._emulate_output import Output


@dataclass(frozen=True)
class NodeEnd:
    """How a node ended; `status` is None where it was ended before it could say."""

    name: str
    address: str
    gpus: str  # its CUDA_VISIBLE_DEVICES
    status: int | None
    seconds: float


@dataclass(frozen=True)
class EmulateReport(Report):
    """How a job on emulated nodes ended. `ok` is `status` 0.

        report = emulate(["torchrun", "train.py"], nodes=2); report.status, report.nodes[0].seconds

    - `status`: exit status of the first node that failed, else 0
    - `ended`: "" by itself, else "interrupted", "terminated" or "timeout"
    - `nodes`: of each its `name`, `address`, `gpus` (its CUDA_VISIBLE_DEVICES), `status` (None where it was ended
      before it could say) and `seconds`
    - `namespaces`: each node had a host name and a network of its own; `why_plain`: the reason where they had not
    - `seconds`: how long all took; `command`: what ran on each node
    """

    command: tuple[str, ...]
    nodes: tuple[NodeEnd, ...]
    namespaces: bool  # each node had a host name and a network of its own
    why_plain: str  # the reason where they had not
    status: int
    ended: str  # "", "interrupted", "terminated" or "timeout"
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == 0

    def text(self, color: bool = False, width: int = 80) -> str:
        how = f"{len(self.nodes)} nodes, {self.seconds:.1f} s"
        if self.ended:
            return f"{how}: {self.ended}\n"
        failed = [node for node in self.nodes if node.status]
        if not failed:
            return f"{how}: all ended well\n" if self.ok else f"{how}: the nodes were killed\n"
        first = min(failed, key=lambda node: node.seconds)
        return f"{how}: {first.name} failed first, with status {first.status} after {first.seconds:.1f} s\n"


def emulate(
    command: Sequence[str],
    *,
    nodes: int = 2,
    gpus_per_node: int = 4,
    plain: bool = False,
    prefix: bool = True,
    grace: float = 10.0,
    timeout: float | None = None,
    stdout: int = 1,
    stderr: int = 2,
    tell: Callable[[str], None] | None = None,
) -> EmulateReport:
    """Run `command` once for each of several nodes of this one machine, as a job that spans them.

    A plain `torchrun --nproc-per-node 4 train.py` becomes a job of `nodes` nodes: torchrun reads number of nodes, node
    rank and rendezvous from PET_ variables, and explicit options win. Other programs find NNODES, NODE_RANK,
    MASTER_ADDR and MASTER_PORT, and `{node}`, `{nodes}`, `{master_addr}`, `{master_port}` in the command are replaced.
    Each node has a host name and a network of its own where the machine allows namespaces; else (or with `plain`) they
    are plain processes. CUDA_VISIBLE_DEVICES is its share of the GPUs. `tell` is called with lines that say what a
    node lacks. When a node fails the others have `grace` seconds to end by themselves; `timeout` (seconds) ends all.
    Nothing is left behind, whichever way it ends. A command that is not there is a UsageError.

        report = emulate(["torchrun", "--nproc-per-node", "4", "train.py"], nodes=2)
        sys.exit(report.status)
    """
    if not command:
        raise UsageError("no command to run", "mldebug emulate --nodes 2 -- torchrun --nproc-per-node 4 train.py")
    for name, value in (("nodes", nodes), ("gpus_per_node", gpus_per_node)):
        least = 1 if name == "nodes" else 0
        if not least <= value <= 200:
            raise UsageError(f"{name} is {value}", f"give a number from {least} to 200")
    job = plan(list(command), nodes, gpus_per_node, plain=plain, free_port=_free_port())
    return _Run(job, prefix, grace, timeout, (stdout, stderr), tell or (lambda line: None)).report()


class _Run:
    """The guard process, the output of the nodes and the signals of this process."""

    def __init__(
        self, job: Plan, prefix: bool, grace: float, timeout: float | None, streams: tuple[int, int],
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._job = job
        self._grace = grace
        self._timeout = timeout
        self._tell = tell
        self._outputs = [Output(streams[0]), Output(streams[1])]
        self._prefix = prefix
        self._ends: dict[int, tuple[int, float]] = {}
        self._first_failed: int | None = None
        self._namespaces = False
        self._why = ""
        self._ended = ""
        self._said = b""

    def report(self) -> EmulateReport:
        began = time.monotonic()
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        pipes = [[os.pipe() for _ in self._outputs] for _node in self._job.nodes] if self._prefix else []
        guard = None
        try:
            handed = [control, status, *(write for node in pipes for _read, write in node)]
            handed += [] if self._prefix else [output.fd for output in self._outputs]
            words = [sys.executable, "-I", "-S", _emulate_guard.__file__, str(control), str(status)]
            guard = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=handed, start_new_session=True)
            for fd in (control, status, *(write for node in pipes for _read, write in node)):
                os.close(fd)
            os.write(self._control, json.dumps(self._spec(pipes)).encode() + b"\n")
            with self._signals():
                self._listen(pipes, began)
        finally:
            with contextlib.suppress(OSError):
                os.close(self._control)  # the guard ends what is left
            if guard is not None:
                guard.wait()
            os.close(self._status)
            for node in pipes:
                for read, _write in node:
                    os.close(read)
        return self._made(time.monotonic() - began)

    def _spec(self, pipes: list[list[tuple[int, int]]]) -> dict[str, Any]:
        nodes = []
        for number, node in enumerate(self._job.nodes):
            fds = [write for _read, write in pipes[number]] if pipes else [output.fd for output in self._outputs]
            more = {"name": node.name, "address": node.address, "cwd": os.getcwd(), "stdout": fds[0], "stderr": fds[1]}
            nodes.append({**more, "command": node.command, "env": node.env, "plain_env": node.plain_env,
                          "plain_command": node.plain_command})  # fmt: skip
        return {"nodes": nodes, "plain": self._job.plain, "grace": self._grace}

    def _listen(self, pipes: list[list[tuple[int, int]]], began: float) -> None:
        """Until the guard has said its last word and all output is through."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._status, selectors.EVENT_READ, None)
            for number, node in enumerate(pipes):
                for stream, (read, _write) in enumerate(node):
                    name = f"[{self._job.nodes[number].name}] "
                    selector.register(read, selectors.EVENT_READ, self._outputs[stream].writer(name))
            while selector.get_map():
                left = (
                    None if self._timeout is None or self._ended else max(0.0, began + self._timeout - time.monotonic())
                )
                for key, _events in selector.select(left):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fd)
                    if key.data is None:
                        self._hear(data, began)
                    elif not key.data.take(data):
                        self._order("kill")  # the reader went away: as with any program, that ends it
                if self._timeout is not None and not self._ended and time.monotonic() - began >= self._timeout:
                    self._ended = "timeout"
                    self._tell(f"timeout: {self._timeout:g} s are over; the nodes have {self._grace:g} s to end")
                    self._order(str(int(signal.SIGTERM)))

    def _hear(self, data: bytes, began: float) -> None:
        self._said += data
        *lines, self._said = self._said.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said["event"] == "way":
                self._namespaces, self._why = said["namespaces"], said["why"]
                self._tell(self._job.words(self._namespaces, self._why))
            elif said["event"] == "ended":
                self._ends[said["node"]] = (said["status"], time.monotonic() - began)
                if said["status"] and self._first_failed is None and not self._ended:  # else it was ended by us
                    self._first_failed = said["node"]
                    name = self._job.nodes[said["node"]].name
                    left = len(self._job.nodes) - len(self._ends)
                    others = f"; {left} more, which have {self._grace:g} s to end" if left else ""
                    self._tell(f"{name} failed with status {said['status']}{others}")

    def _order(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._control, word.encode() + b"\n")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and the like go to the nodes; the second Ctrl-C ends them."""

        def pass_on(number: int, _frame: object) -> None:
            if self._ended == "interrupted":
                self._order("kill")
            self._ended = "interrupted" if number == signal.SIGINT else "terminated"
            self._order(str(number))

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _made(self, seconds: float) -> EmulateReport:
        ends = []
        for number, node in enumerate(self._job.nodes):
            status, after = self._ends.get(number, (None, seconds))
            ends.append(
                NodeEnd(
                    node.name, node.address if self._namespaces else "127.0.0.1", node.gpus, status, round(after, 3)
                )
            )
        if self._ended:
            status = {"interrupted": 130, "terminated": 143, "timeout": 124}[self._ended]
        elif self._first_failed is not None:
            status = self._ends[self._first_failed][0]
        else:
            status = 0 if len(self._ends) == len(ends) else 137
        command, seconds = tuple(self._job.command), round(seconds, 3)
        return EmulateReport(command, tuple(ends), self._namespaces, self._why, status, self._ended, seconds)


def _free_port() -> int:
    """A port of this machine that nobody listens on, for nodes that share its network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
