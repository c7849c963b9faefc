"""distributed_memory: what torch.distributed itself takes of a GPU, beside the tensors of the job."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.report import Report, paint
from mldebug.core.world import World, world
from mldebug.perf.memory._reading import Reading, look, size


@dataclass(frozen=True)
class Stage:
    """A stage and what it took, in bytes: by the driver's count less what torch's allocator took in it, on a GPU;
    by the size of the process on the CPU. None: the driver does not say."""

    name: str
    taken: int | None
    reading: Reading


@dataclass(frozen=True)
class DistributedMemoryReport(Report):
    """Of one rank. `taken` is what is in use beside tensors after the first collectives, and before the group ended."""

    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    stages: tuple[Stage, ...]

    @property
    def taken(self) -> int | None:
        known = [stage.taken for stage in self.stages[:-1]]
        return None if None in known else sum(count or 0 for count in known)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "taken": self.taken}

    def text(self, color: bool = False, width: int = 80) -> str:
        what = "of the card" if self.device != "cpu" else "of host memory"
        lines = [
            f"rank {self.rank}/{self.world_size} on {self.host}, {self.device}: torch.distributed ({self.backend}) "
            f"and what it needs take {size(self.taken)} {what}"
        ]
        for stage in self.stages:
            now = stage.reading.card.used if stage.reading.card.total else stage.reading.host.rss
            sign = "+" if (stage.taken or 0) >= 0 else ""
            lines.append(f"  {stage.name:<34} {sign}{size(stage.taken):>10}   now {size(now)}")
        text = "\n".join(lines)
        return paint(text) if color else text


def distributed_memory(
    backend: str | None = None,
    *,
    nbytes: int = 64 << 20,
    early: bool = False,
    timeout: float = 60.0,
    tell: Callable[[str, Reading], None] | None = None,
) -> DistributedMemoryReport:
    """What a process group takes: at its start, at the first collectives, and what its end gives back.

    Every rank of a job calls it (`torchrun ...`), before it has a process group; alone it is a group of one. Stages:
    the device's context, init, the first barrier, the second, an all_reduce of `nbytes` bytes, point-to-point to
    the neighbours, the end of the group. `early` gives init the device, so that NCCL connects there and not in the
    first collective. `tell` is called with each stage as it ends. No other process may come or go on the card
    meanwhile: the driver counts them all. Raises UsageError where there is a group already, and
    for a backend that is not here.

        report = distributed_memory()
        print(report.text())
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError("this torch is built without torch.distributed", "install a build that has it")
    if dist.is_initialized():
        raise UsageError("there is a process group already", "call it before init_process_group")
    me = world()
    on_cuda = torch.cuda.is_available()
    backend = backend or ("nccl" if on_cuda else "gloo")
    _check_backend(dist, backend, on_cuda)
    stages: list[Stage] = []
    last = look("start")

    def ended(name: str) -> None:
        nonlocal last
        if on_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        now = look(name)
        stages.append(Stage(name, _taken(last, now), now))
        last = now
        if tell is not None:
            tell(name, now)

    device = torch.device("cpu")
    if on_cuda:
        device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    ended("the context of the device" if on_cuda else "torch loaded")
    with _group(dist, me, backend, device if early and on_cuda else None, timeout):
        ended("init_process_group")
        dist.barrier()
        ended("first barrier")
        dist.barrier()
        ended("second barrier")
        data = torch.zeros(max(1, nbytes // 4), device=device)
        dist.all_reduce(data)
        del data
        ended(f"all_reduce of {size(nbytes)}")
        if me.world_size > 1:
            _to_neighbours(dist, torch, me, device)
            ended("send and recv")
    ended("destroy_process_group")
    return DistributedMemoryReport(me.rank, me.world_size, me.host, last.card.device, backend, tuple(stages))


def _check_backend(dist: Any, backend: str, on_cuda: bool) -> None:
    """Of "cpu:gloo,cuda:nccl" each."""
    for name in (part.rpartition(":")[2].lower() for part in backend.split(",")):
        if not dist.is_backend_available(name):
            here = [one for one in dist.Backend.backend_list if one != "undefined" and dist.is_backend_available(one)]
            raise UsageError(f"this torch has no backend {name!r}", f"it has {', '.join(here)}")
        if name == "nccl" and not on_cuda:
            raise UsageError("nccl needs an accelerator, and torch sees none", "gloo needs none")


def _taken(before: Reading, now: Reading) -> int | None:
    if now.card.total is None:
        return None if now.host.rss is None or before.host.rss is None else now.host.rss - before.host.rss
    if now.card.used is None or before.card.used is None:
        return None
    return now.card.used - before.card.used - ((now.card.reserved or 0) - (before.card.reserved or 0))


@contextlib.contextmanager
def _group(dist: Any, me: World, backend: str, device: Any, timeout: float) -> Iterator[None]:
    more: dict[str, Any] = {"device_id": device} if device is not None else {}
    limit = datetime.timedelta(seconds=timeout)
    with contextlib.ExitStack() as stack:
        if me.world_size == 1 and "MASTER_ADDR" not in os.environ:  # alone: no address to meet at
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            more["init_method"] = f"file://{folder}/store"
        else:
            more["init_method"] = "env://"
        dist.init_process_group(backend, rank=me.rank, world_size=me.world_size, timeout=limit, **more)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _to_neighbours(dist: Any, torch: Any, me: World, device: Any) -> None:
    """A megabyte around the ring, as a pipeline has it."""
    data, got = torch.zeros(1 << 18, device=device), torch.zeros(1 << 18, device=device)
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, right), dist.P2POp(dist.irecv, got, left)])
    for one in work:
        one.wait()
