"""The end of a coordinator: it waits for those that can hear it."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from mldebug.cluster._hub import Agent, Hub
from mldebug.cluster.dist._wire import Wire


class Plain(Hub):
    def _take(self, agent: Agent, message: dict[str, Any]) -> None: ...

    def _left(self, agent: Agent, why: str) -> None: ...

    def _patience(self) -> float:
        return 60.0


@pytest.mark.parametrize("loaded", [True, False], ids=["computes", "loads torch"])
def test_the_end_waits_for_those_that_can_hear_it(loaded: bool) -> None:
    """One that computes has a moment to leave by itself; one that still loads torch would hear of it seconds later."""
    ours, theirs = socket.socketpair()
    hub = Plain("job", socket.create_server(("127.0.0.1", 0)))
    agent = Agent(Wire(ours), name="node1", loaded=loaded)
    hub.agents.append(agent)
    hub._selector.register(ours, 1, agent)
    began = time.monotonic()
    hub.end({"t": "end"})
    took = time.monotonic() - began
    with theirs:
        assert b'"end"' in theirs.recv(4096), "it is told in either case, for when it listens"
    assert hub.silent == [agent]
    assert took > 2.5 if loaded else took < 2.5
