"""What comms and pairs share to hear of workers on many hosts: plain sockets to what looks after those of each.

It loads no torch: what is measured carries nothing of it.
"""

from __future__ import annotations

import abc
import contextlib
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field

from mldebug.cluster.dist._wire import Gone, Message, Wire

_TICK = 0.05
_PARTING = 3.0  # seconds in which the other ends may leave by themselves


@dataclass(eq=False)
class Agent:
    """What looks after the workers of a host."""

    wire: Wire
    name: str = ""  # the host
    address: str = ""
    boot: str = ""
    rank: int | None = None
    pid: int = 0
    local: list[int] = field(default_factory=list)
    loaded: bool = False
    early: list[Message] = field(default_factory=list)  # what its workers said before all hosts were there


class Hub(abc.ABC):
    """`agents` are connected, `came` have said who they are, `silent` were given up without an end: they may be
    stopped. A subclass takes what they say, and decides what it means that one is lost."""

    def __init__(self, job: str, listener: socket.socket) -> None:
        self.job, self.listener = job, listener
        self.agents: list[Agent] = []
        self.came: list[Agent] = []
        self.silent: list[Agent] = []
        self._beat = 0.0
        self._over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @abc.abstractmethod
    def _take(self, agent: Agent, message: Message) -> None:
        """A message of an agent, or of one of its workers."""

    @abc.abstractmethod
    def _left(self, agent: Agent, why: str) -> None:
        """An agent is lost before the end: "has gone: ..." or "said nothing for 7 s"."""

    @abc.abstractmethod
    def _patience(self) -> float:
        """Seconds that an agent may say nothing; it beats twice a second."""

    def end(self, message: Message) -> None:
        """Say to all that it is over, and wait for a moment for those that can hear it: not while they load torch."""
        self._over = True
        for agent in list(self.agents):
            self._send(agent, message)
        limit = time.monotonic() + _PARTING
        while time.monotonic() < limit and any(agent.loaded for agent in self.agents):
            self._turn()
        self.silent += self.agents
        for agent in self.agents:
            agent.wire.close()
        self._selector.close()
        self.listener.close()

    def _turn(self) -> None:
        """Hear and say what there is, for a moment."""
        now = time.monotonic()
        if now - self._beat > 1.0:
            self._beat = now
            for agent in list(self.agents):
                self._send(agent, {"t": "beat"})
        for agent in list(self.agents):
            if agent.wire.waits_to_write:
                with contextlib.suppress(Gone):
                    agent.wire.flush()
        for key, _ in self._selector.select(_TICK):
            if key.fileobj is self.listener:
                with contextlib.suppress(OSError):
                    sock, address = self.listener.accept()
                    agent = Agent(Wire(sock), address=str(address[0]).removeprefix("::ffff:"))
                    self.agents.append(agent)
                    self._selector.register(sock, selectors.EVENT_READ, agent)
            else:
                self._hear(key.data)
        for agent in list(self.agents):
            if agent.loaded and now - agent.wire.heard > self._patience():
                self.silent.append(agent)
                self._lost(agent, f"said nothing for {now - agent.wire.heard:.0f} s")

    def _hear(self, agent: Agent) -> None:
        try:
            for message in agent.wire.receive():
                self._take(agent, message)
        except Gone as exc:
            self._lost(agent, f"has gone: {exc}")

    def _greeted(self, agent: Agent, message: Message, late: bool) -> bool:
        """Whether that was a greeting, and is done with. Who greets when it is `late` takes no part any more."""
        kind = message.get("t")
        if kind not in ("who", "hello") or message.get("job") != self.job:
            return False
        if kind == "who":
            self._send(agent, {"t": "welcome"})
            return True
        agent.name, agent.boot, agent.rank = message["host"], message["boot"], message["rank"]
        agent.local, agent.pid = message["local"], int(message["pid"])
        if not late and agent.rank not in [other.rank for other in self.came if other.rank is not None]:
            self.came.append(agent)
        return True

    def _send(self, agent: Agent, message: Message) -> None:
        try:
            agent.wire.send(message)
        except Gone as exc:
            self._lost(agent, f"has gone: {exc}")

    def _lost(self, agent: Agent, why: str) -> None:
        if agent not in self.agents:
            return
        self.agents.remove(agent)
        self._selector.unregister(agent.wire.sock)
        agent.wire.close()
        if not self._over:
            self._left(agent, why)


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def address_for(agent: Agent, other: Agent) -> str:
    """Where `agent` finds the host of `other`; "" for the place where it found the hub."""
    if agent.boot and agent.boot == other.boot:
        return "127.0.0.1"
    ours = other.wire.sock.getsockname()[0].removeprefix("::ffff:")
    return "" if other.address in ("127.0.0.1", "::1", ours) else other.address
