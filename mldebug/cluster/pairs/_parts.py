"""Who takes part in a live pair matrix, and what is wanted of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mldebug.cluster._hub import Agent
from mldebug.cluster.dist._wire import Message


@dataclass(eq=False)
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
    device: str = ""  # its name

    def come(self, message: Message) -> None:
        """Its worker is ready."""
        self.state, self.port, self.pid = "ready", message["port"], message["pid"]
        self.device = str(message.get("device", ""))


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
    noisy: bool = False  # slow pairs are measured once more, alone
