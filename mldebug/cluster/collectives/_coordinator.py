"""Step by step through the benchmark, with all ranks: who does what next, until when, and what they say of it.

It talks to what looks after the ranks over plain sockets, and loads no torch: what is measured carries nothing of it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mldebug.cluster._hub import Agent, Hub, address_for, signal_name
from mldebug.cluster.dist._wire import Message

_GRACE = 1.5  # seconds after the first sign of a failure, in which its cause may show itself
_SILENT = 10.0  # seconds; what looks after ranks beats twice a second
_MISSED = 4.0  # seconds without a beat, which tell a host apart from the others once nothing goes on


@dataclass(eq=False)
class Rank:
    number: int
    host: str
    local: int
    agent: Agent
    pid: int = 0
    process: str = ""  # the state of its process: T is stopped
    facts: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # how far it came in this step
    answer: Message | None = None
    why: str = ""  # what it said of itself before it ended
    gone: str = ""  # how it ended
    stack: list[str] = field(default_factory=list)

    def title(self) -> str:
        return f"rank {self.number} on {self.host} (pid {self.pid})"


@dataclass
class Trouble(Exception):
    """The run cannot go on. `kind` is start, dead, hang, memory or error; `ranks` are to blame, where known."""

    kind: str
    why: str
    ranks: list[int]


class Coordinator(Hub):
    """`gather()` the ranks, then `step()` after step; `end()` in any case."""

    def __init__(
        self,
        job: str,
        agents: int,
        listener: socket.socket,
        failures: Callable[[], dict[str, str]],
        timeout: float,
        start_timeout: float,
    ) -> None:
        super().__init__(job, listener)
        self.agents_wanted, self.failures = agents, failures
        self.timeout, self.start_timeout = timeout, start_timeout
        self.ranks: list[Rank] = []
        self._steps = 0

    def gather(self, hosts: list[str]) -> None:
        """Until all ranks are there and have their device. Raises Trouble where some do not come."""
        deadline = time.monotonic() + self.start_timeout
        while len(self.came) < self.agents_wanted:
            self._turn()
            failed = self.failures()
            if failed or time.monotonic() > deadline:
                self._missing(hosts, failed)
        order = {host: number for number, host in enumerate(hosts)}
        self.came.sort(key=lambda agent: (agent.rank or 0, order.get(agent.name, 0), agent.name))
        for agent in self.came:
            for local in agent.local:
                self.ranks.append(Rank(len(self.ranks), agent.name, local, agent))
        for agent in self.came:
            for message in agent.early:
                self._take(agent, message)
        if len(self.ranks) < 2:
            raise Trouble("start", "there is one rank, and a collective needs two", [])
        while waiting := [rank for rank in self.ranks if not rank.facts]:
            self._turn()
            for rank in waiting:
                if rank.gone or rank.why:
                    raise Trouble("start", f"{rank.title()} did not start: {rank.why or rank.gone}", [rank.number])
            if time.monotonic() > deadline:
                numbers = [rank.number for rank in waiting]
                raise Trouble("start", f"torch or the device did not load within {self.start_timeout:g} s", numbers)

    def _missing(self, hosts: list[str], failed: dict[str, str]) -> None:
        came = {agent.name for agent in self.came}
        absent = [host for host in hosts if host not in came] or list(failed)
        if failed:
            raise Trouble("start", "; ".join(f"{host}: {why}" for host, why in failed.items()), [])
        heard = {agent.rank for agent in self.came if agent.rank is not None}
        ranks = [number for number in range(self.agents_wanted) if number not in heard] if heard else []
        who = f"ranks {', '.join(map(str, ranks))}" if ranks else ", ".join(absent) or "a host"
        raise Trouble("start", f"{who} did not come within {self.start_timeout:g} s", ranks)

    def step(self, do: str, seconds: float = 0.0, only: int | None = None, **told: Any) -> list[Message]:
        """All ranks do this; their answers by rank, with "failed" in one that says so where all could go on.

        `seconds` is how long it should take: that is added to the timeout. Raises Trouble where it does not end.
        """
        self._steps += 1
        asked = self.ranks if only is None else [self.ranks[only]]
        for rank in asked:
            rank.answer, rank.where = None, ""
            self._send(
                rank.agent,
                {"t": "task", "local": rank.local, "id": self._steps, "do": do, "address": "", **told}
                | self._own(rank, told),
            )
        began, trouble = time.monotonic(), 0.0
        while any(rank.answer is None for rank in asked):
            self._turn()
            now = time.monotonic()
            dead = [rank for rank in asked if rank.gone]
            failed = [rank for rank in asked if rank.answer and rank.answer["t"] == "failed"]
            if dead or failed:
                trouble = trouble or now
                if now - trouble > _GRACE and any(rank.answer is None for rank in asked):
                    self._failed(do, dead, failed)
            elif now - began > self.timeout + 3 * seconds:
                self._hangs(do, [rank for rank in asked if rank.answer is None], now - began)
        if dead := [rank for rank in asked if rank.gone]:
            self._failed(do, dead, [])
        return [rank.answer or {} for rank in asked]

    def _own(self, rank: Rank, told: Message) -> Message:
        """What is another for each rank: how it reaches the first one."""
        if "port" not in told:
            return {}
        address = address_for(rank.agent, self.ranks[0].agent)
        return {"rank": rank.number, "world": len(self.ranks), "address": address}

    def _failed(self, do: str, dead: list[Rank], failed: list[Rank]) -> None:
        if dead:
            who = "; ".join(f"{rank.title()} {rank.why or rank.gone}" for rank in dead)
            raise Trouble("dead", f"{who}, {_DOING.get(do, do)}", [rank.number for rank in dead])
        first = failed[0]
        assert first.answer is not None
        kind = "memory" if first.answer.get("oom") else "error"
        raise Trouble(
            kind, f"{first.title()}, {_DOING.get(do, do)}: {first.answer['why']}", [rank.number for rank in failed]
        )

    def _hangs(self, do: str, late: list[Rank], seconds: float) -> None:
        """Who holds it up: who is not heard any more, else who is stopped, else who did not come as far as others,
        else who stands elsewhere."""
        for rank in late:
            self._send(rank.agent, {"t": "stack", "local": rank.local})
        limit = time.monotonic() + 4.0
        while time.monotonic() < limit and any(not rank.stack and rank.process not in ("T", "t") for rank in late):
            self._turn()
        blamed, how = _unheard(late) or _blame(late)
        raise Trouble(
            "hang",
            f"{_names(blamed)} {how}, {_DOING.get(do, do)}: no answer for {seconds:.0f} s",
            [rank.number for rank in blamed],
        )

    # What is heard

    def _take(self, agent: Agent, message: Message) -> None:
        if self._greeted(agent, message, late=bool(self.ranks)):
            return
        if message.get("t") == "loaded":
            agent.loaded = True
        elif not self.ranks:
            agent.early.append(message)
        else:
            for rank in self.ranks:
                if rank.agent is agent:
                    self._said(rank, message)

    def _said(self, rank: Rank, message: Message) -> None:
        kind = message["t"]
        if kind == "beat":
            rank.process = message["states"].get(str(rank.local), "")
        elif message.get("local") != rank.local:
            return
        elif kind == "ready":
            rank.facts, rank.pid = message["facts"], message["pid"]
        elif kind == "broken":
            rank.why = f"failed: {message['why']}"
        elif kind == "stack":
            rank.stack = message["frames"]
        elif kind == "ended":
            code = message["code"]
            rank.gone = f"was killed by {signal_name(-code)}" if code < 0 else f"left with status {code}"
        elif message.get("id") == self._steps:
            if kind == "at":
                rank.where = message["where"]
            elif kind in ("done", "failed"):
                rank.answer = message

    def _left(self, agent: Agent, why: str) -> None:
        for rank in self.ranks:
            if rank.agent is agent:
                rank.gone = rank.gone or f"is lost: its host {why}"

    def _patience(self) -> float:
        return max(_SILENT, self.timeout)


_DOING = {
    "store": "while the first rank opened its store", "init": "while the ranks found each other",
    "allocate": "while memory was allocated", "warm": "in the first calls", "time": "while calls were timed",
    "check": "while the contents were checked", "probe": "while each rank was looked at",
    "objects": "while objects were sent",
}  # fmt: skip

_ORDER = ("", "init", "allocate", "call", "launched")


def _unheard(late: list[Rank]) -> tuple[list[Rank], str] | None:
    """The ranks of hosts that went silent while others still speak."""
    now = time.monotonic()
    lost = [rank for rank in late if now - rank.agent.wire.heard > _MISSED]
    if not lost or len({rank.agent for rank in lost}) == len({rank.agent for rank in late}):
        return None
    hosts = ", ".join(dict.fromkeys(rank.host for rank in lost))
    silent = min(now - rank.agent.wire.heard for rank in lost)
    return lost, f"cannot be reached: nothing is heard of {hosts} for {silent:.0f} s"


def _blame(late: list[Rank]) -> tuple[list[Rank], str]:
    if stopped := [rank for rank in late if rank.process in ("T", "t")]:
        return stopped, "is stopped (SIGSTOP)" if len(stopped) == 1 else "are stopped (SIGSTOP)"
    places = [_ORDER.index(rank.where) if rank.where in _ORDER else 0 for rank in late]
    if min(places) < max(places):
        behind = [rank for rank, place in zip(late, places, strict=True) if place == min(places)]
        return behind, "did not come as far as the others"
    if (odd := [rank for rank in late if rank.stack and not _waits(rank.stack[0])]) and len(odd) < len(late):
        return odd, f"does not wait as the others do: it is in {odd[0].stack[0]}"
    return late, "wait for each other, or for the network"


def _waits(frame: str) -> bool:
    """Whether a call is one of torch, or of the benchmark that waits for it."""
    return "/torch/" in frame or "/collectives/_worker.py" in frame or "/collectives/_calls.py" in frame


def _names(ranks: list[Rank]) -> str:
    if len(ranks) == 1:
        return ranks[0].title()
    return f"ranks {', '.join(str(rank.number) for rank in ranks)}"
