"""One rank of the benchmark: a process of its own that makes the calls and times them, step by step as it is told."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mldebug.cluster.collectives._table import COLLECTIVES, width_of
from mldebug.cluster.dist._wire import Gone, Message, Wire

_SLACK = 512 << 20  # bytes of an accelerator that are left to others
_MOST_SHIFTS = 64


def work(local: int, backend: str, wire: Wire) -> None:
    """The life of a worker: its errors are said, and it ends with the process that looks after it."""
    worker = Worker(local, backend, wire)
    try:
        worker.run()
    except Gone:
        return
    except Exception as exc:
        with contextlib.suppress(Gone):
            worker.say({"t": "broken", "why": _first_line(exc)})


class Worker:
    """`run()` does what is asked for until the other end of `wire` has gone."""

    def __init__(self, local: int, backend: str, wire: Wire) -> None:
        self.local, self.backend, self.wire = local, backend, wire
        self.rank, self.world = 0, 1
        self.id = 0
        self.buffers: tuple[Any, Any] = (None, None)
        self.nccl: Any = None

    def run(self) -> None:
        from mldebug.cluster.collectives._nccl_log import NcclLog
        from mldebug.cluster.dist._device import Device

        self.device = Device(self.backend, self.local)
        self.log = NcclLog()
        # Else NCCL captures an event beside each call, so that calls outside of the graph may run at the same time.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
        self.say({"t": "ready", "facts": self._facts()})
        while True:
            for message in self.wire.wait(time.monotonic() + 3600.0):
                if message.get("t") == "task":
                    self.id = message["id"]
                    try:
                        self.say({"t": "done", "id": self.id, **getattr(self, f"do_{message['do']}")(message)})
                    except Gone:
                        raise
                    except Exception as exc:  # whatever the library says: the other ranks are to hear of it
                        full = self._is_full(exc)
                        self.say({"t": "failed", "id": self.id, "why": _first_line(exc), "oom": full})
                        del exc

    def say(self, message: Message) -> None:
        self.wire.send(message)
        while self.wire.waits_to_write:
            time.sleep(0.001)
            self.wire.flush()

    def at(self, where: str) -> None:
        """How far this rank came in its step, for the case that it goes no further."""
        self.say({"t": "at", "id": self.id, "where": where})

    def _facts(self) -> Message:
        import torch

        facts = self.device.facts()
        version = ""
        if self.device.backend == "nccl":
            nccl: Any = torch.cuda.nccl
            version = ".".join(map(str, nccl.version()))
        return {
            "name": facts["name"], "index": facts["index"], "uuid": facts["uuid"], "backend": self.device.backend,
            "torch": torch.__version__, "nccl": version, "free": self._free(),
        }  # fmt: skip

    def _free(self) -> int:
        if self.device.kind != "cpu":
            return int(self.device.module.mem_get_info()[0]) - _SLACK
        from mldebug.core.device import host_memory

        return host_memory()[0] // 2

    def _is_full(self, exc: BaseException) -> bool:
        from mldebug.core.device import Device as Known

        return Known(self.device.kind, self.device.index).out_of_memory(exc)

    # Steps

    def do_store(self, told: Message) -> Message:
        """Rank 0 has the store that the ranks find each other by."""
        import torch.distributed as dist

        self.store: Any = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        return {"port": self.store.port}

    def do_init(self, told: Message) -> Message:
        import torch
        import torch.distributed as dist

        began = time.monotonic()
        self.rank, self.world = told["rank"], told["world"]
        timeout = timedelta(seconds=4 * told["timeout"] + 60)  # the deadline is the coordinator's
        if self.rank:
            self.store = dist.TCPStore(  # type: ignore[attr-defined]
                told["address"], told["port"], None, False, timeout=timeout, wait_for_workers=False
            )
        bound: dict[str, Any] = {"device_id": self.device.torch_device} if self.device.kind != "cpu" else {}
        self.at("init")
        dist.init_process_group(
            self.device.backend, store=self.store, rank=self.rank, world_size=self.world, timeout=timeout, **bound
        )
        self.tiny = torch.zeros(1, device=self.device.torch_device)
        dist.all_reduce(self.tiny)
        self.device.sync()
        if self.device.kind != "cpu":
            self.side = self.device.module.Stream()
        from mldebug.cluster.collectives._nccl_log import routes

        return {
            "seconds": time.monotonic() - began, "routes": routes(self.log.new_text(), self.rank)
        }  # fmt: skip

    def do_nccl(self, told: Message) -> Message:
        """A communicator of NCCL's own, for what torch.distributed does not have."""
        from mldebug.cluster.collectives._nccl import Nccl

        def exchange(identity: bytes | None) -> bytes:
            if identity is not None:
                self.store.set("mldebug-nccl", identity)
            return bytes(self.store.get("mldebug-nccl"))

        self.at("init")
        self.nccl = Nccl(self.rank, self.world, exchange)
        self.device.sync()
        return {}

    def do_free(self, told: Message) -> Message:
        return {"free": self._free()}

    def do_allocate(self, told: Message) -> Message:
        """Buffers for the largest payload of a dtype, with what is in them while they are timed."""
        import torch

        from mldebug.cluster.collectives._data import fill, timed_period

        self.buffers = (None, None)
        gc.collect()
        if self.device.kind != "cpu":
            self.device.module.empty_cache()
        dtype, device = getattr(torch, told["dtype"]), self.device.torch_device
        self.at("allocate")
        count = told["bytes"] // width_of(told["dtype"])
        made = [torch.empty(count, dtype=dtype, device=device) if wanted else None for wanted in told["wanted"]]
        self.quiet = timed_period(self.rank, self.world, dtype, device)
        for buffer in made:
            if buffer is not None:
                fill(buffer, self.quiet)
        self.buffers = (made[0], made[1])
        self.device.sync()
        return {}

    def do_warm(self, told: Message) -> Message:
        """The first calls at a payload; seconds of one of them."""
        calls = self._calls(told, told["warm"] + 1)
        self.log.new_text()  # of the steps before
        self.at("call")
        for call in calls[:-1]:
            call()
        self.device.sync()
        seconds = self.device.seconds(calls[-1])
        from mldebug.cluster.collectives._nccl_log import chosen

        return {"seconds": seconds, "chosen": chosen(self.log.new_text(), told["collective"])}

    def do_time(self, told: Message) -> Message:
        """Seconds of a call, and of each call where each is timed by itself."""
        import torch.distributed as dist

        iters = told["iters"]
        calls = self._calls(told, iters)
        dist.all_reduce(self.tiny)  # a barrier, on the device
        self.at("call")
        if told["mode"] == "barrier":
            each = [self._after_barrier(call) for call in calls]
            return {"seconds": sum(each) / iters, "each": each}
        if told["mode"] == "graph":
            return {"seconds": self._replayed(calls, told["launches"])}
        return {"seconds": self._timed(lambda: _one_after_another(calls), calls[0]) / iters}

    def do_check(self, told: Message) -> Message:
        """How many elements come out wrong at this rank."""
        import torch

        from mldebug.cluster.collectives import _data

        case = self._case(told)
        send, receive = self.buffers
        source, target = case.slices(send, receive, 0)
        whole = receive[: case.span]
        reduced = case.kind.reduces
        made: Any
        if reduced:
            made = _data.Reduced(told["turn"], self.world, case.op, whole.dtype, whole.device)
        else:
            made = _data.Moved(told["turn"], whole.dtype, whole.device)
        _data.fill(whole, torch.zeros_like(self.quiet))
        _data.fill(source, made.of(self.rank))
        if case.kind.rooted and not reduced and case.kind.split == "none" and self.rank != case.root:
            _data.fill(source, torch.zeros_like(self.quiet))  # broadcast: what is there before is of no account
        call = case.call(source, target, self.nccl)
        self.at("call")
        if told["mode"] == "graph":
            self._graph([call]).replay()
        else:
            call()
        self.device.sync()
        wrong = self._wrong(case, target, made)
        for buffer in self.buffers:
            if buffer is not None:
                _data.fill(buffer[: case.span], self.quiet)
        self.device.sync()
        return {"wrong": wrong}

    def _wrong(self, case: Any, target: Any, made: Any) -> int:
        from mldebug.cluster.collectives._data import count_wrong

        kind = case.kind
        if kind.rooted and kind.name != "broadcast" and kind.name != "scatter" and self.rank != case.root:
            return 0  # only the root receives
        if kind.reduces:
            period, share = made.result()
            start = self.rank * case.received if kind.split == "send" else 0
            return count_wrong(target, period, start, share)
        if kind.name == "broadcast":
            return count_wrong(target, made.of(case.root))
        if kind.name == "scatter":
            return count_wrong(target, made.of(case.root), self.rank * case.received)
        if kind.name == "sendrecv":
            return count_wrong(target, made.of((self.rank - 1) % self.world))
        part = case.received // self.world
        start = self.rank * part if kind.name == "alltoall" else 0
        return sum(
            count_wrong(target[sender * part : (sender + 1) * part], made.of(sender), start)
            for sender in range(self.world)
        )

    def do_probe(self, told: Message) -> Message:
        """What a rank needs by itself: seconds to launch a call, and the bandwidth of its own memory."""
        import torch
        import torch.distributed as dist

        launches = []
        self.at("call")
        for _ in range(told["iters"]):
            dist.barrier()
            began = time.perf_counter()
            handle = dist.all_reduce(self.tiny, async_op=True)
            launches.append(time.perf_counter() - began)
            handle.wait()
        self.device.sync()
        # The buffers may fill the card; this is the last step, so they are not needed any more.
        self.buffers = (None, None)
        size = 16 << 20
        if self.device.kind != "cpu":
            self.device.module.empty_cache()
            size = max(1 << 20, min(256 << 20, self.device.module.mem_get_info()[0] // 4 >> 20 << 20))
        source = torch.ones(size // 4, device=self.device.torch_device)
        target = torch.empty_like(source)
        target.copy_(source)
        best = min(self.device.seconds(functools.partial(target.copy_, source)) for _ in range(5))
        return {"launch_us": sorted(launches)[len(launches) // 2] * 1e6, "copy_gbps": 2 * size / best / 1e9}

    def do_objects(self, told: Message) -> Message:
        """Seconds of a call that tells all ranks a number: as objects, by all_gather, by all_reduce."""
        import torch
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        number = torch.ones(1, device=self.device.torch_device)
        parts = [torch.zeros_like(number) for _ in range(self.world)]
        ways: dict[str, Callable[[], Any]] = {
            "all_gather_object": lambda: dist.all_gather_object(found, 1),
            "all_gather": lambda: dist.all_gather(parts, number),
            "all_reduce": lambda: dist.all_reduce(number, op=dist.ReduceOp.MAX),
        }
        self.at("call")
        seconds = {}
        for name, way in ways.items():
            way()
            self.device.sync()
            began = time.perf_counter()
            for _ in range(told["iters"]):
                way()
            self.device.sync()
            seconds[name] = (time.perf_counter() - began) / told["iters"]
        return {"seconds": seconds, "wrong": int(found != [1] * self.world)}

    # How it is done

    def _case(self, told: Message) -> Any:
        from mldebug.cluster.collectives._calls import Case

        kind = COLLECTIVES[told["collective"]]
        sent, received = kind.counts(told["bytes"], width_of(told["dtype"]), self.world)
        return Case(kind, sent, received, told["place"], told["op"], told["root"], self.rank, self.world)

    def _calls(self, told: Message, count: int) -> list[Any]:
        """`count` calls that go through the buffers, as those of nccl-tests do: no payload stays in the cache."""
        case = self._case(told)
        send, receive = self.buffers
        shifts = max(1, min(receive.numel() // case.span, count, _MOST_SHIFTS))
        made = [case.call(*case.slices(send, receive, shift), self.nccl) for shift in range(shifts)]
        return [made[number % shifts] for number in range(count)]

    def _graph(self, calls: list[Any]) -> Any:
        import torch

        graph = torch.cuda.CUDAGraph()
        self.device.sync()
        with torch.cuda.stream(self.side):
            graph.capture_begin(capture_error_mode="thread_local")
            _one_after_another(calls)
            graph.capture_end()
        self.device.sync()
        return graph

    def _replayed(self, calls: list[Any], launches: int) -> float:
        import torch.distributed as dist

        graph = self._graph(calls)
        dist.all_reduce(self.tiny)  # capturing takes some ranks longer than others
        self.device.sync()
        seconds = self._timed(lambda: _one_after_another([graph.replay] * launches), graph.replay)
        return seconds / launches / len(calls)

    def _timed(self, what: Any, lead: Any) -> float:
        """Seconds on the device. `lead` goes before: while it runs, what is to be timed is queued behind it."""
        lead()
        return self.device.seconds(what, queued=lambda: self.at("launched"))

    def _after_barrier(self, call: Any) -> float:
        import torch.distributed as dist

        dist.barrier()
        return self.device.seconds(call)


def _one_after_another(calls: list[Any]) -> None:
    for call in calls:
        call()


def _first_line(exc: BaseException) -> str:
    lines = f"{type(exc).__name__}: {exc}".strip().splitlines()
    return lines[0][:300] if lines else type(exc).__name__
