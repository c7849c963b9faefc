"""What looks after the workers of one host in a live pair matrix: it forks them, kills them, and passes on what they
say.

It loads torch once and forks a worker for each GPU from there: one that has to be replaced is back in a moment. No
device is touched before the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

from mldebug.cluster.dist._local import boot_id, devices_here
from mldebug.cluster.dist._wire import Gone, Message, Wire, connects
from mldebug.core.stacks import process_state

_SILENCE = 60.0  # seconds without a word of the coordinator, after which it is taken for gone


@dataclass
class _Child:
    local: int
    pid: int
    wire: Wire | None
    left: bool = False  # its end was seen


class Node:
    """`run()` returns when the coordinator says so, or has gone; then no worker is left."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.local = [int(one) for one in told["local"]] or list(range(int(told["nproc"]) or devices_here()))
        self.children: dict[int, _Child] = {}
        self.place = ("", 0)  # where the coordinator was found
        self.beat = 0.0

    def run(self) -> Message:
        self.link = self._connect()
        try:
            self.say(
                {
                    "t": "hello", "job": self.told["job"], "host": self.told["host"] or socket.gethostname(),
                    "boot": boot_id(), "pid": os.getpid(), "local": self.local, "rank": self.told["rank"],
                }
            )  # fmt: skip
            with contextlib.suppress(Exception):  # each worker meets the same fault, and says it
                self.load()
            # Only now, when there is somebody to kill: raised in an import it would not be what ends the process.
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
            self.say({"t": "loaded"})
            for local in self.local:
                self._fork(local)
            return self._look_after()
        finally:
            for child in self.children.values():
                self._kill(child)

    def say(self, message: Message) -> None:
        self.link.send(message)

    def load(self) -> None:
        """What all workers need, once, before they are forked."""
        import torch.distributed  # noqa: F401

    def work(self, local: int, wire: Wire) -> None:
        """What the worker of a GPU does: in its own process, from the fork to its end."""
        from mldebug.cluster.pairs import _worker

        _worker.work(local, self.told["backend"], wire)

    def _connect(self) -> Wire:
        deadline = time.monotonic() + self.told["timeout"]
        places = [(str(address), int(port)) for address, port in self.told["places"]]
        while True:
            found = connects(places, min(3.0, max(0.5, deadline - time.monotonic())))
            wire: Wire | None = None
            for place, sock in found.items():
                if not isinstance(sock, str):
                    if wire is None and (wire := self._welcomed(sock)) is not None:
                        self.place = place
                    elif wire is None or wire.sock is not sock:
                        sock.close()
            if wire is not None:
                return wire
            if time.monotonic() > deadline:
                why = ", ".join(f"{place[0]}:{place[1]} {sock}" for place, sock in found.items() if sock)
                raise Gone(f"the coordinator cannot be reached from {socket.gethostname()}: {why or 'no address'}")
            time.sleep(0.2)

    def _welcomed(self, sock: socket.socket) -> Wire | None:
        """Whether the coordinator of this job is at the other end: anybody may have its port."""
        wire = Wire(sock)
        with contextlib.suppress(Gone):
            wire.send({"t": "who", "job": self.told["job"]})
            if any(message.get("t") == "welcome" for message in wire.wait(time.monotonic() + 3.0)):
                return wire
        return None

    def _look_after(self) -> Message:
        while True:
            with selectors.DefaultSelector() as selector:
                for wire in (self.link, *(child.wire for child in self.children.values())):
                    if wire is not None:
                        selector.register(wire.sock, selectors.EVENT_READ)
                selector.select(0.2 if not self.link.waits_to_write else 0.01)
            self.link.flush()
            for message in self.link.receive():
                if message["t"] == "end":
                    return message
                self._obey(message)
            for child in list(self.children.values()):
                self._hear(child)
            now = time.monotonic()
            if now - self.link.heard > _SILENCE:
                raise Gone(f"the coordinator said nothing for {_SILENCE:g} s")
            if now - self.beat > 0.5:
                self.beat = now
                states = {str(child.local): process_state(child.pid) for child in self.children.values()}
                self.say({"t": "beat", "states": states})

    def _obey(self, message: Message) -> None:
        local = int(message.get("local", -1))
        if message["t"] == "renew":
            if local in self.children:
                self._kill(self.children.pop(local))
            self._fork(local)
        elif message["t"] == "task" and (child := self.children.get(local)) is not None and child.wire is not None:
            message["address"] = message["address"] or self.place[0]
            with contextlib.suppress(Gone):  # its end is noticed where it is read
                child.wire.send(message)

    def _hear(self, child: _Child) -> None:
        if child.wire is not None:
            try:
                for message in child.wire.receive():
                    self.say({**message, "local": child.local, "pid": child.pid})
                child.wire.flush()
            except Gone:
                child.wire.close()
                child.wire = None
        if child.wire is None and not child.left:
            done, status = os.waitpid(child.pid, os.WNOHANG)
            if done:
                child.left = True
                code = os.waitstatus_to_exitcode(status)
                self.say({"t": "ended", "local": child.local, "pid": child.pid, "code": code})

    def _fork(self, local: int) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: torch was loaded and has not computed yet
            pid = os.fork()
        if pid == 0:
            self._be_worker(local, theirs, ours, parent)
        theirs.close()
        self.children[local] = _Child(local, pid, Wire(ours))

    def _be_worker(self, local: int, sock: socket.socket, other: socket.socket, parent: int) -> NoReturn:
        try:
            end_with_parent(parent)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            other.close()
            self.link.close()
            for child in self.children.values():
                if child.wire is not None:
                    child.wire.close()
            warnings.simplefilter("ignore")
            self.work(local, Wire(sock))
        finally:
            # Without the ends of torch and of CUDA, which may wait for a peer that hangs.
            os._exit(0)

    def _kill(self, child: _Child) -> None:
        if not child.left:
            with contextlib.suppress(OSError):
                os.kill(child.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(child.pid, 0)
        if child.wire is not None:
            child.wire.close()


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent ends, in whatever way."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def main(kind: type[Node] = Node, name: str = "pairs") -> int:
    """`argv[1]` is JSON: see `_start.told()`. What the coordinator judged goes to stdout if asked for."""
    told = json.loads(sys.argv[1])
    if told["parent"]:
        end_with_parent(told["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which ends us
    os.environ.update(told["env"])
    try:
        message = kind(told).run()
    except Gone as exc:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"mldebug {name}: {exc}\n")
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no worker is left, and torch takes its time to end
    if told["tell"]:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
