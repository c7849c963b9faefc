"""The collector of a dist-test: hears from every rank over plain sockets, and decides when it is over.

It lives in the launcher, or, where ranks were started by torchrun, srun or mpirun, in a process of its own beside
rank 0, so that it can still say what happened to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mldebug.cluster.dist._evidence import Evidence, empty, new_rank
from mldebug.cluster.dist._local import boot_id
from mldebug.cluster.dist._wire import Gone, Message, Wire, allow_files

_TICK = 0.1
_GRACE = 1.5  # seconds in which others may still say what they saw, after the first has failed
_APART = 5.0  # seconds in which ranks may come that seem to be on other hosts
_LAST = 0.3  # seconds in which they may when all are ended: the launcher kills what is still there a second later
_STOPPED = 1.0  # seconds without a look: somebody had stopped this process, and lets it go on
_STARTING = ("start", "import", "device")  # phases that a cold file system can hold up


@dataclass(frozen=True)
class Config:
    """What a dist-test is to do; the collector's is the one that counts, and it sends it to all."""

    world: int
    job: str
    backend: str = "auto"
    timeout: float = 30.0
    start_timeout: float = 180.0
    sizes: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(told: dict[str, Any]) -> Config:
        return Config(**{**told, "sizes": tuple(told["sizes"])})


class Collector:
    """`run()` returns when the test is over and everybody was told, with the report that `judge` made of it.

    `judge(evidence)` gives the report as a dict; `shown` is then True if rank 0 said that it has shown it.
    """

    def __init__(self, config: Config, listener: socket.socket, judge: Callable[[Evidence], dict[str, Any]]) -> None:
        self.config = config
        self.listener = listener
        self.judge = judge
        self.shown = False
        self.report: dict[str, Any] = {}
        self._judged = threading.Event()
        self.evidence = empty(config.world, config.backend, config.timeout)
        self.evidence["collector"] = {
            "host": socket.gethostname(), "pid": os.getpid(), "port": listener.getsockname()[1],
        }  # fmt: skip
        self._began = self._moved = self._joined = time.monotonic()
        self._moves: dict[int, float] = {}  # rank -> when it last got on
        self._stopped: dict[str, float] = {}  # rank -> since when it is seen stopped
        self._of: dict[int, Wire] = {}  # rank -> the connection of the process that looks after it
        self._wires: dict[Wire, list[int]] = {}
        self._at: dict[str, set[int]] = {}  # stage -> ranks that wait at its end
        self._stage = "facts"
        self._trouble = 0.0  # when the first one failed
        self._terminated = 0.0  # when it was told to end itself
        self._turned = time.monotonic()  # when it last looked at what was said
        self._apart = 0.0  # when it is sure that the nodes have a loopback address for rank 0, and never meet
        self._pinged = 0.0
        self._selector = selectors.DefaultSelector()

    @property
    def ranks(self) -> dict[str, Any]:
        ranks: dict[str, Any] = self.evidence["ranks"]
        return ranks

    def host_failed(self, host: str, why: str) -> None:
        """A host on which no ranks could be started. May be called from another thread."""
        self.evidence["hosts"][host] = why

    def interrupt(self) -> dict[str, Any]:
        """End the test now, from another thread: the report of what was seen, {} if it does not come in a second."""
        self._stage = "interrupted"
        self._judged.wait(1.0)
        return self.report

    def terminate(self) -> None:
        """The launcher ends the job, as it does when one rank failed: `run()` returns soon, with what is known."""
        self._terminated = self._terminated or time.monotonic()

    def continued(self) -> None:
        """SIGCONT came. mpirun sends it to all ranks a second before it ends them; to us it is no news otherwise."""
        if time.monotonic() - self._turned < _STOPPED:
            self.terminate()

    def run(self) -> dict[str, Any]:
        self._selector.register(self.listener, selectors.EVENT_READ)
        allow_files(4 * self.config.world + 128)
        try:
            while not (why := self._over()):
                self._turn(_TICK)
            if why not in ("done", "interrupted", "terminated"):
                self._ask_for_stacks()
            report = self._finish(why)
            self._tell(report)
            return report
        finally:
            for wire in list(self._wires):
                wire.close()
            self._selector.close()
            self.listener.close()

    # What is heard

    def _turn(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self.listener:
                self._accept()
            else:
                self._read(key.data)
        now = self._turned = time.monotonic()
        for wire in list(self._wires):
            if wire.waits_to_write or now - self._pinged >= 1.0:
                self._send(wire, {"t": "ping"})
        if now - self._pinged >= 1.0:
            self._pinged = now

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            if len(self._wires) > 4 * self.config.world + 64:
                sock.close()
                return
            wire = Wire(sock)
            self._wires[wire] = []
            self._selector.register(sock, selectors.EVENT_READ, wire)

    def _read(self, wire: Wire) -> None:
        try:
            messages = wire.receive()
        except Gone as exc:
            self._lost(wire, str(exc))
            return
        for message in messages:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a stranger, who says anything
                self._hear(wire, message)

    def _hear(self, wire: Wire, message: Message) -> None:
        kind = message["t"]
        if kind == "hello":
            self._hello(wire, message)
        elif kind == "whose":
            self._send(wire, {"t": "whose", "mine": message["job"] == self.config.job})
        elif kind == "seen":  # what one process saw of another one that looks after a rank
            if message["job"] == self.config.job and (one := self.ranks.get(str(message["rank"]))) is not None:
                one["parent_state"] = str(message["state"])
        elif self._wires.get(wire):
            self._hear_rank(wire, message)

    def _hello(self, wire: Wire, message: Message) -> None:
        if message["job"] != self.config.job:
            self._send(wire, {"t": "refused", "why": "this is the collector of another job", "other": True})
            return
        host, boot, parent = str(message["host"]), str(message["boot"]), int(message["pid"])
        for rank, local_rank, pid in message["ranks"]:
            if why := self._clash(int(rank), int(message["world"])):
                self.evidence["clashes"].append({"rank": rank, "host": host, "pid": parent, "why": why})
                self._trouble = self._trouble or time.monotonic()
                continue
            self.ranks[str(rank)] = new_rank(int(rank), int(local_rank), host, boot, int(pid), parent)
            self.ranks[str(rank)] |= {"local_world": message["local_world"] or 0, "apart": message["apart"]}
            if message["apart"] and message["apart"][0].startswith("MASTER_ADDR="):
                self._apart = self._apart or time.monotonic() + _APART
            elif message["apart"]:
                self._trouble = self._trouble or time.monotonic()
            self.ranks[str(rank)]["address"] = wire.sock.getpeername()[0]
            self._of[int(rank)] = wire
            self._wires[wire].append(int(rank))
            self._moves[int(rank)] = self._joined = self._moved = time.monotonic()
        if self._apart and len(self.ranks) == self.config.world:  # several nodes on one machine: all met here
            self._apart = 0.0
            for one in self.ranks.values():
                one["apart"] = []
        mine = self.evidence["collector"]
        told = {"pid": mine["pid"], "host": mine["host"], "boot": boot_id()}
        self._send(wire, {"t": "welcome", **told, "config": self.config.to_dict()})

    def _clash(self, rank: int, world: int) -> str:
        if world != self.config.world:
            return f"it was told of {world} ranks, and the others of {self.config.world}"
        if not 0 <= rank < world:
            return f"there is no rank {rank} among {world}"
        if (other := self.ranks.get(str(rank))) is not None:
            return f"rank {rank} is already taken by pid {other['parent']} on {other['host']}"
        return ""

    def _hear_rank(self, wire: Wire, message: Message) -> None:
        kind = message["t"]
        if kind == "beat":
            for rank, state in message["states"].items():
                self.ranks[rank]["state"] = str(state)
            self._note_clock(wire, float(message["time"]))
            return
        if kind == "shown":
            self.shown = True
            return
        if kind == "terminated":
            for rank in self._wires[wire]:
                self.ranks[str(rank)]["terminated"] = round(time.monotonic() - self._began, 3)
            return
        rank = int(message["rank"])
        one = self.ranks[str(rank)]
        if kind == "stack":
            one["stack"], one["no_stack"] = str(message["stack"])[:20_000], str(message["why"])[:500]
        elif kind == "ended":
            one["code"] = int(message["code"])
            if not one["done"]:
                self._trouble = self._trouble or time.monotonic()
        else:
            self._moves[rank] = self._moved = time.monotonic()
            self._hear_worker(rank, one, message)

    def _hear_worker(self, rank: int, one: dict[str, Any], message: Message) -> None:
        kind = message["t"]
        if kind == "phase":
            one["phase"], one["step"], one["waits"] = str(message["phase"]), int(message["step"]), False
        elif kind == "facts":
            one["facts"].update(message["facts"])
        elif kind == "check":
            one["checks"][str(message["check"])] = message["result"]
        elif kind == "wrong":
            if len(self.evidence["wrong"]) < 10_000:
                self.evidence["wrong"].append({**message["what"], "rank": rank})
        elif kind == "left_out":
            if [message["check"], message["why"]] not in self.evidence["left_out"]:
                self.evidence["left_out"].append([message["check"], message["why"]])
        elif kind == "reach":
            one["reach"], one["large"] = message["links"], message["large"]
        elif kind == "error":
            one["error"] = {**message["error"], "after": round(time.monotonic() - self._began, 3)}
            self._trouble = self._trouble or time.monotonic()
        elif kind == "at":
            self._at.setdefault(str(message["stage"]), set()).add(rank)
            one["waits"] = True
            one["done"] = message["stage"] == "run"
            self._advance()

    def _note_clock(self, wire: Wire, told: float) -> None:
        """How far a host's clock is from ours: the smallest difference seen, as messages are late at times."""
        skew = told - time.time()
        for rank in self._wires[wire]:
            before = self.ranks[str(rank)]["skew"]
            if before is None or abs(skew) < abs(before):
                self.ranks[str(rank)]["skew"] = round(skew, 3)

    def _lost(self, wire: Wire, why: str) -> None:
        if wire not in self._wires:
            return
        self._selector.unregister(wire.sock)
        wire.close()
        for rank in self._wires.pop(wire):
            self._of.pop(rank, None)
            if not self.ranks[str(rank)]["done"]:
                self.ranks[str(rank)]["lost"] = why
                self._trouble = self._trouble or time.monotonic()

    # What follows from it

    def _advance(self) -> None:
        if len(self._at.get(self._stage, ())) < self.config.world:
            return
        if self._stage == "facts":
            self._stage = "reach"
            peers = [
                [one["rank"], one["host"], *one["facts"]["door"]] for _, one in sorted(self.ranks.items(), key=_number)
            ]
            for wire in list(self._wires):
                self._send(wire, {"t": "go", "stage": "reach", "peers": peers})
        elif self._stage == "reach":
            self._stage = "run"
            store = self.ranks["0"]["facts"].get("store")
            address = self.ranks["0"]["address"].removeprefix("::ffff:")
            # Rank 0 came from this address. Where it is on our own host the others take the one that they found us at.
            if address in ("127.0.0.1", "::1") or address == self._of[0].sock.getsockname()[0].removeprefix("::ffff:"):
                address = ""
            for wire in list(self._wires):
                self._send(wire, {"t": "go", "stage": "run", "store": [address, store]})
        elif self._stage == "run":
            self._stage = "done"

    def _over(self) -> str:
        """Why the test has to end now, or ""."""
        now = time.monotonic()
        if self._stage in ("done", "interrupted"):
            return self._stage
        if self._terminated and now - self._terminated > _LAST:
            return "terminated"
        if self._stage == "reach" and not self._at.get("reach") and self._fatal():
            return "the ranks cannot work together"
        if self._stage == "run" and "checked" not in self._at:
            self._at["checked"] = set()
            if self._fatal():
                return "the ranks cannot reach each other"
        if self._trouble and now - self._trouble > _GRACE:
            return "a rank failed"
        if self._apart and now > self._apart:
            return "the nodes do not meet"
        timeout = self.config.timeout
        if len(self.ranks) < self.config.world and (now - self._joined > timeout or self._rest_is_here()):
            return f"not all ranks came within {timeout:g} s of each other"
        for rank, one in self.ranks.items():
            wire = self._of.get(int(rank))
            one["silent"] = round(now - wire.heard, 1) if wire is not None else 0.0
            if one["silent"] > timeout and not one["done"]:
                return f"nothing was heard from rank {rank} for {timeout:g} s"
            if one["state"] not in ("T", "t"):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > timeout and not one["done"]:
                return f"rank {rank} is stopped"
        starting = any(one["phase"] in _STARTING for one in self.ranks.values())
        limit = max(timeout, self.config.start_timeout) if starting else timeout
        return f"no rank got on for {limit:g} s" if now - self._moved > limit else ""

    def _rest_is_here(self) -> bool:
        """Whether only ranks of hosts that failed are missing."""
        failed, plan = self.evidence["hosts"], self.evidence.get("plan", {})
        return bool(failed) and all(rank in self.ranks or host in failed for rank, host in plan.items())

    def _fatal(self) -> bool:
        """Whether what is known before the first collective makes it useless to go on."""
        return any(one.get("fatal") for one in self.judge(self._aged())["culprits"])

    def _ask_for_stacks(self) -> None:
        """Of those that are behind, and of one that waits for them."""
        running = [one for one in self.ranks.values() if one["code"] is None and not one["done"]]
        running.sort(key=lambda one: one["step"])
        asked = [one["rank"] for one in running[:8]] + [one["rank"] for one in running[8:][-1:]]
        asked = [rank for rank in asked if rank in self._of and self.ranks[str(rank)]["silent"] < 3]
        for rank in asked:
            self._send(self._of[rank], {"t": "stack", "rank": rank})
        limit = time.monotonic() + 4.0
        while time.monotonic() < limit:
            if all(self.ranks[str(rank)]["no_stack"] or rank not in self._of for rank in asked):
                break
            self._turn(_TICK)

    def _aged(self) -> Evidence:
        now = time.monotonic()
        for rank, one in self.ranks.items():
            one["age"] = round(now - self._moves[int(rank)], 1)
        self.evidence["seconds"] = round(now - self._began, 2)
        self.evidence["missing_for"] = round(now - self._joined, 1)
        return self.evidence

    def _finish(self, why: str) -> dict[str, Any]:
        self.evidence["ended"] = why
        self.report = self.judge(self._aged())
        self._judged.set()
        return self.report

    def _tell(self, report: dict[str, Any]) -> None:
        """Give everybody the report, and leave once rank 0 has shown it and all others are gone, or late.

        All but rank 0 get it without the evidence, which is large in a large job.
        """
        self._selector.unregister(self.listener)  # who comes now is of another test of the same job
        self.listener.close()
        for wire in list(self._wires):
            whole = wire is self._of.get(0) and not self._terminated  # else it is ended, too, and shown here
            told = report if whole else {**report, "evidence": {}}
            self._send(wire, {"t": "end", "report": told, "shown": bool(self._terminated)})
        limit = time.monotonic() + (0.0 if self._terminated else 3.0)
        while not self.shown and 0 in self._of and time.monotonic() < limit:
            self._turn(0.02)
        for wire in list(self._wires):
            self._send(wire, {"t": "bye"})
        limit = time.monotonic() + (0.0 if self._terminated else 2.0)
        while self._wires and time.monotonic() < limit:
            self._turn(0.02)

    def _send(self, wire: Wire, message: Message) -> None:
        try:
            wire.send(message)
        except Gone as exc:
            self._lost(wire, str(exc))


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])
