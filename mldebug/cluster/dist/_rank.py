"""One rank of a dist-test: the program that loads torch and goes through the phases, saying each before it begins.

It has a socket to the process that looks after it, and obeys it. It ends when that process ends, and ends it where it
was stopped and nobody else can.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import warnings
from typing import Any, NoReturn

from mldebug.cluster.dist._probe import LARGE, SLOW, answer, send_large, some_of_other_hosts
from mldebug.cluster.dist._wire import Gone, Message, Wire, connects, reason
from mldebug.core.stacks import process_state

_FOREVER = 86400.0
_AT_ONCE = 256  # connections


class Rank:
    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank = rank
        self.wire = wire
        self.config: dict[str, Any] = {}
        self.step = 0

    def phase(self, name: str) -> None:
        """What begins now: the last that is known of a rank that does not come back from it."""
        self.step += 1
        self.say({"t": "phase", "phase": name, "step": self.step})

    def say(self, message: Message) -> None:
        self.wire.send(message)
        while self.wire.waits_to_write:  # who looks after us is slow, not gone: that would end us
            time.sleep(0.001)
            self.wire.flush()

    def await_message(self, kind: str) -> Message:
        while True:
            for message in self.wire.wait(time.monotonic() + _FOREVER):
                if message.get("t") == "end":
                    _leave(0)
                if message.get("t") == kind:
                    return message

    def meet(self, stage: str) -> Message:
        """Say that a stage is over here, and wait until it is for all."""
        self.say({"t": "at", "stage": stage})
        return self.await_message("end" if stage == "run" else "go")

    def run(self) -> None:
        self.phase("import")
        import torch.distributed  # noqa: F401 - the phase is about this

        told = self.await_message("config")
        self.config = told["config"]
        _watch_parent(told, self.rank)
        self.phase("device")
        from mldebug.cluster.dist._device import Device
        from mldebug.cluster.dist._facts import door, facts

        device = Device(self.config["backend"], int(os.environ["LOCAL_RANK"]))
        self.say({"t": "facts", "facts": {"device": device.facts(), "backend": device.backend}})
        self.phase("facts")
        self.say({"t": "facts", "facts": facts(device)})
        listener, place = door(device.backend)
        answer(listener)
        store = self._open_store() if self.rank == 0 else None
        self.say({"t": "facts", "facts": {"door": place, "store": getattr(store, "port", None)}})
        peers = self.meet("facts")["peers"]
        self.phase("reach")
        self.say({"t": "reach", **self._reach(peers)})
        go = self.meet("reach")
        listener.close()
        self._check(device, store, go["store"], told["collector"][0])
        self.phase("end")
        self.meet("run")

    def _open_store(self) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, self.config["world"], True, wait_for_workers=False
        )

    def _reach(self, peers: list[list[Any]]) -> dict[str, list[list[Any]]]:
        """`links`: the ranks that cannot be connected to, or get no large packets, each with where it listens and why.

        `large`: the seconds that much data took to some ranks of other hosts.
        """
        others = [peer for peer in peers if peer[0] != self.rank]
        much = some_of_other_hosts(self.rank, peers)
        failed, large = [], []
        seconds = max(2.0, min(5.0, self.config["timeout"] / 3))
        for start in range(0, len(others), _AT_ONCE):
            some = others[start : start + _AT_ONCE]
            found = connects([(str(address), int(port)) for _, _, address, port in some], seconds)
            tried: list[tuple[list[Any], socket.socket]] = []
            for rank, host, address, port in some:
                result = found[(str(address), int(port))]
                if isinstance(result, str):
                    failed.append([rank, host, address, port, result])
                elif rank in much:
                    tried.append(([rank, host, address, port], result))
                else:
                    result.close()
            for place, took in _sent(tried, seconds):
                if took is None:
                    failed.append([*place, f"{LARGE >> 10} KiB do not come through in {seconds:g} s"])
                else:
                    large.append([*place, round(took, 4)])
        return {"links": failed, "large": large}

    def _check(self, device: Any, store: Any, place: list[Any], collector: str) -> None:
        from datetime import timedelta

        import torch.distributed as dist

        from mldebug.cluster.dist._collectives import Collectives

        for name, result in device.checks(self.phase):
            self.say({"t": "check", "check": name, "result": result})
        self.phase("init")
        world, timeout = self.config["world"], timedelta(seconds=max(120.0, 4 * self.config["timeout"]))
        if store is None:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                place[0] or collector, place[1], world, False, timeout=timeout
            )
        # Our own deadline comes first: who hangs is to be seen hanging, and not to be torn down.
        bound = {"device_id": device.torch_device} if device.kind != "cpu" else {}
        dist.init_process_group(device.backend, store=store, rank=self.rank, world_size=world, timeout=timeout, **bound)
        Collectives(self.rank, world, device, self.config["sizes"], self).run()


def _sent(tried: list[tuple[list[Any], socket.socket]], seconds: float) -> list[tuple[list[Any], float | None]]:
    """How long much data takes to each place; a way that seems slow has a second chance, as one end may be busy."""
    took = send_large([sock for _, sock in tried], seconds)
    for _, sock in tried:
        sock.close()
    again = [number for number, one in enumerate(took) if one is None or one > SLOW]
    found = connects([(str(tried[number][0][2]), int(tried[number][0][3])) for number in again], seconds)
    for number in again:
        result = found[(str(tried[number][0][2]), int(tried[number][0][3]))]
        if not isinstance(result, str):
            (second,) = send_large([result], seconds)
            result.close()
            took[number] = min((one for one in (took[number], second) if one is not None), default=None)
    return [(place, one) for (place, _), one in zip(tried, took, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--fd", type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends us
    _end_with_parent()
    warnings.simplefilter("ignore")  # torch's are about its own names, once for each rank
    rank = Rank(args.rank, Wire(socket.socket(fileno=args.fd)))
    try:
        rank.run()
    except Gone:
        _leave(1)
    except BaseException as exc:
        with contextlib.suppress(Gone):
            rank.say({"t": "error", "error": {"type": type(exc).__name__, "message": str(exc)[:2000]}})
            rank.await_message("end")
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Without the ends of torch and of CUDA, which may wait for ranks that hang."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            _leave(1)


def _watch_parent(told: Message, rank: int) -> None:
    """Look whether the process that looks after us is stopped: only we can see it where it is alone on its host."""
    threading.Thread(target=_see_parent, args=(told, rank, os.getppid()), daemon=True).start()


def _see_parent(told: Message, rank: int, parent: int) -> None:
    stopped, timeout = 0.0, float(told["config"]["timeout"])
    wire: Wire | None = None
    while os.getppid() == parent:
        time.sleep(0.5)
        if process_state(parent) not in ("T", "t"):
            stopped = 0.0
            continue
        stopped += 0.5
        over = stopped > timeout + 5.0
        if stopped >= 3.0 and wire is None:
            found = next(iter(connects([(told["collector"][0], told["collector"][1])], 2.0).values()))
            if isinstance(found, str):
                over = over or found == reason(ConnectionRefusedError(111, ""))  # the test is over
            else:
                wire = Wire(found)
                with contextlib.suppress(Gone):
                    wire.send({"t": "seen", "job": told["job"], "rank": rank, "state": "T"})
        if wire is not None:
            try:
                over = over or any(message.get("t") == "end" for message in wire.receive())
            except Gone:
                over = True
        if over and process_state(parent) in ("T", "t"):
            with contextlib.suppress(OSError):
                os.kill(parent, signal.SIGKILL)
            _leave(1)
    _leave(1)


if __name__ == "__main__":
    main()
