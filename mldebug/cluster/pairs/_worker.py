"""One GPU's worker of a live pair matrix: a process of its own that measures one pair after another, as it is told.

Each pair gets a process group of its own, over a prefix of the store of its first member, so that nothing of a pair
that failed is left for the next. What it finds is said over a plain socket, one direction at a time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from datetime import timedelta
from functools import partial
from typing import Any

from mldebug.cluster.dist._wire import Gone, Message, Wire

_SECONDS = 0.04  # that one measurement takes, about
_MOST_TURNS = 100
_SLOW = 0.4  # seconds of a single message, from which on it is not repeated
_TRIES = 3  # the best counts: what else a machine does makes a link slower only
_PINGS = 20
_TINY = 64  # bytes, for the latency
_LARGE, _SMALL = 256 << 20, 4 << 20  # bytes for accelerators, and for CPUs
_STEP = 251  # a prime, so that patterns do not repeat along with pages and packets


class Worker:
    """`run()` measures until the other end of `wire` has gone."""

    def __init__(self, local: int, backend: str, wire: Wire) -> None:
        self.local = local
        self.backend = backend
        self.wire = wire

    def run(self) -> None:
        import torch.distributed as dist

        from mldebug.cluster.dist._device import Device

        self.device = Device(self.backend, self.local)
        self.store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        name = self.device.module.get_device_name(self.device.torch_device) if self.device.kind != "cpu" else ""
        self.say({"t": "ready", "port": self.store.port, "backend": self.device.backend, "device": name})
        while True:
            for message in self.wire.wait(time.monotonic() + 3600.0):
                if message.get("t") == "task":
                    try:
                        self.measure(message)
                    except Gone:
                        raise
                    except Exception as exc:  # whatever the library says of a pair: the others go on
                        why = f"{type(exc).__name__}: {exc}".strip().splitlines()
                        self.say({"t": "failed", "id": message["id"], "why": why[0][:300]})

    def say(self, message: Message) -> None:
        self.wire.send(message)
        while self.wire.waits_to_write:
            time.sleep(0.001)
            self.wire.flush()

    def measure(self, task: Message) -> None:
        import torch.distributed as dist

        timeout = timedelta(seconds=4 * task["timeout"] + 60)  # the deadline is the coordinator's
        store = self.store
        if task["member"] > 0:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                task["address"], task["port"], None, False, timeout=timeout, wait_for_workers=False
            )
        store = dist.PrefixStore(f"mldebug-pairs/{task['id']}", store)  # type: ignore[attr-defined]
        bound: dict[str, Any] = {"device_id": self.device.torch_device} if self.device.kind != "cpu" else {}
        dist.init_process_group(
            self.device.backend, store=store, rank=task["member"], world_size=task["members"], timeout=timeout, **bound
        )
        link = _Link(self.device, store, task)
        if task["mode"] == "nodes":
            result = link.all_reduce()
        else:
            result = {"latency_us": link.latency()}
            for sender in (0, 1):
                gbps, wrong = link.one_way(sender)
                if task["member"] != sender:
                    self.say({"t": "part", "id": task["id"], "gbps": gbps, "wrong": wrong})
            result["both_gbps"] = link.both_ways()
        self.say({"t": "measured", "id": task["id"], **result})
        del link
        dist.destroy_process_group()
        self.say({"t": "free", "id": task["id"]})


class _Link:
    """Measurements of one group. Each returns GBps or microseconds as this member saw them."""

    def __init__(self, device: Any, store: Any, task: Message) -> None:
        self.device = device
        self.store = store
        self.member: int = task["member"]
        self.members: int = task["members"]
        self.ids: list[int] = task["gpus"]
        self.bytes: int = (task["bytes"] or (_SMALL if device.kind == "cpu" else _LARGE)) // 8 * 8 or 8
        self.steps = 0

    def latency(self) -> float:
        """Half of a round trip of a few bytes that this member begins, in microseconds."""
        import torch

        ball = torch.zeros(_TINY // 8, dtype=torch.int64, device=self.device.torch_device)
        found = 0.0
        for server in (0, 1):
            self._pingpong(ball, server, 3)  # connections are made by the first message
            if self.device.kind == "cpu":
                trips = [self.device.seconds(partial(self._pingpong, ball, server, 1)) for _ in range(_PINGS)]
                seconds = statistics.median(trips)  # a CPU has more to do than this
            else:
                seconds = self.device.seconds(partial(self._pingpong, ball, server, _PINGS)) / _PINGS
            found = seconds / 2 * 1e6 if self.member == server else found
        return round(found, 2)

    def one_way(self, sender: int) -> tuple[float, int]:
        """(GBps, wrong words) of `sender` to the other: what the receiver sees. The sender's figures mean nothing."""
        import torch.distributed as dist

        first, rest = self._pattern(sender, 0), self._pattern(sender, 1)
        peer = 1 - self.member
        if self.member == sender:
            dist.send(first, peer)
            turns, _ = self._turns(lambda: dist.send(rest, peer), peer)
            for _ in range(_TRIES if turns else 0):
                _await([dist.isend(rest, peer) for _ in range(turns + 1)])
            self.device.sync()
            return 0.0, 0
        got = self._garbage(first)
        dist.recv(got, peer)
        wrong = int((got != first).sum())
        turns, once = self._turns(lambda: dist.recv(got, peer), self.member)
        seconds = []
        for _ in range(_TRIES if turns else 0):
            self._receive(got, peer, 1)
            seconds.append(self.device.seconds(partial(self._receive, got, peer, turns)) / turns)
        wrong += int((got != rest).sum())
        return self.bytes / min(seconds, default=once) / 1e9, wrong

    def both_ways(self) -> float:
        """GBps each way while both go at once, as sendrecv_perf of nccl-tests counts it."""
        import torch.distributed as dist

        out = self._pattern(self.member, 2)
        got = self._garbage(out)
        peer = 1 - self.member

        def exchange(turns: int = 1) -> None:
            for _ in range(turns):
                _await(dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, got, peer)]))

        exchange()
        return round(self.bytes / self._repeated(exchange) / 1e9, 4)

    def all_reduce(self) -> dict[str, Any]:
        """The busbw of all members, and how many results were wrong."""
        import torch
        import torch.distributed as dist

        count = self.bytes // 4
        ramp = torch.arange(count, device=self.device.torch_device, dtype=torch.int32).remainder_(_STEP)
        values = (ramp + self.member).to(torch.float32)  # sums of small whole numbers are exact
        dist.all_reduce(values)
        wanted = ramp * self.members + self.members * (self.members - 1) // 2
        wrong = int((values != wanted).sum())
        values.zero_()

        def reduce(turns: int = 1) -> None:
            for _ in range(turns):
                dist.all_reduce(values)

        rate = count * 4 / self._repeated(reduce) / 1e9
        return {"gbps": rate * 2 * (self.members - 1) / self.members, "wrong": wrong}

    # How it is done

    def _pingpong(self, ball: Any, server: int, turns: int) -> None:
        import torch.distributed as dist

        peer = 1 - self.member
        for _ in range(turns):
            if self.member == server:
                dist.send(ball, peer)
                dist.recv(ball, peer)
            else:
                dist.recv(ball, peer)
                dist.send(ball, peer)

    def _receive(self, got: Any, peer: int, turns: int) -> None:
        import torch.distributed as dist

        _await([dist.irecv(got, peer) for _ in range(turns)])

    def _repeated(self, what: Any) -> float:
        """Seconds of one of `what(turns)`, which all members do at once."""
        turns, once = self._turns(what, 0)
        seconds = []
        for _ in range(_TRIES if turns else 0):
            what()
            seconds.append(self.device.seconds(partial(what, turns)) / turns)
        return min(seconds, default=once)

    def _turns(self, once: Any, decides: int) -> tuple[int, float]:
        """(how often to repeat it, seconds of one): a member measures, and tells the others over the store. 0: it is
        slow, and that one has to do."""
        self.steps += 1
        seconds = self.device.seconds(once)
        if self.member == decides:
            turns = 0 if seconds > _SLOW else max(2, min(_MOST_TURNS, int(_SECONDS / max(seconds, 1e-6))))
            self.store.set(f"turns{self.steps}", str(turns))
        return int(self.store.get(f"turns{self.steps}")), seconds

    def _pattern(self, sender: int, turn: int) -> Any:
        """What `sender` sends: other words for each GPU, each turn and each place."""
        import torch

        words = torch.arange(self.bytes // 8, dtype=torch.int64, device=self.device.torch_device)
        return words.mul_(_STEP).add_((self.ids[sender] * 8 + turn + 1) << 40)

    def _garbage(self, like: Any) -> Any:
        import torch

        return torch.full_like(like, -1)


def _await(works: list[Any]) -> None:
    for one in works:
        one.wait()


def work(local: int, backend: str, wire: Wire) -> None:
    """The life of a worker: its errors are said, and it ends with the process that looks after it."""
    worker = Worker(local, backend, wire)
    try:
        worker.run()
    except Gone:
        return
    except Exception as exc:
        why = f"{type(exc).__name__}: {exc}".strip().splitlines()
        with contextlib.suppress(Gone):
            worker.say({"t": "broken", "why": why[0][:300]})
