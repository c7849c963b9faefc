"""Who takes part in a live pair matrix, and what is wanted of them."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mldebug.cluster._dist_wire import Message, Wire


@dataclass
class Gpu:
    """A worker and its history. `state` is absent, loading, ready, busy or gone."""

    name: str
    host: str
    local: int
    agent: Agent | None
    state: str = "loading"
    since: float = field(default_factory=time.monotonic)
    port: int = 0
    pid: int = 0
    process: str = ""  # the state of its process: T is stopped
    deaths: int = 0  # in a row
    hangs: int = 0
    why: str = ""  # what it said of itself, or why it is gone
    lost: str = ""  # how it went: missing, start, dead or hang
    past: int = 0  # the process before this one


@dataclass(eq=False)
class Agent:
    wire: Wire
    name: str = ""  # the host
    address: str = ""
    boot: str = ""
    rank: int | None = None
    local: list[int] = field(default_factory=list)
    loaded: bool = False
    early: list[Message] = field(default_factory=list)  # what its workers said before all hosts were there


@dataclass
class Wanted:
    """What is to be measured, and who has to be there for it."""

    job: str
    agents: int  # how many will come
    hosts: Sequence[str] = ()  # their names, in order, where they are known
    mode: str = "pairs"  # or nodes
    sample: bool = False
    bytes: int = 0  # 0: by the device
    timeout: float = 30.0
    start_timeout: float = 180.0


def signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def address_for(agent: Agent, other: Agent) -> str:
    """Where `agent` finds the host of `other`; "" for the place where it found the coordinator."""
    if agent.boot and agent.boot == other.boot:
        return "127.0.0.1"
    ours = other.wire.sock.getsockname()[0].removeprefix("::ffff:")
    return "" if other.address in ("127.0.0.1", "::1", ours) else other.address
