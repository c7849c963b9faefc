"""Every collective with contents that are known: each rank checks what it received against patterns of the senders.

The values are small whole numbers that depend on the rank and the place, chosen so that any sum of them is exact in
bf16: a difference of one bit is wrong, and often tells whose part it is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mldebug.cluster.dist._device import Device
    from mldebug.cluster.dist._rank import Rank

_PERIOD = 1021  # a prime: a pattern does not fit onto itself when it is shifted by a chunk
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = (4, 64 << 10, 1 << 20, 64 << 20)
_HEAVY = 4 << 20  # on a CPU only some collectives carry more than this unless sizes were asked for
_HEAVY_ONES = ("all_reduce", "broadcast", "all_gather")

# How backends say that they lack something; no failure of the cluster.
_UNSUPPORTED = re.compile(
    r"not (yet )?(supported|implemented)|n't support|not support|unsupported|invalid scalar type", re.I
)
_FAILED = re.compile(r"(CUDA|HIP|NCCL|SYCL) error", re.I)

Wrong = dict[str, Any]


class Collectives:
    def __init__(self, rank: int, world: int, device: Device, sizes: Sequence[int], teller: Rank) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self.asked = bool(sizes)
        self.sizes = tuple(sizes) or SIZES
        self.teller = teller
        self._bases: dict[tuple[int, int], torch.Tensor] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._lacking: set[tuple[str, str]] = set()

    def run(self) -> None:
        """Each collective, in each dtype and size; the same ones in the same order on all ranks."""
        for name, dtype, size in self.plan():
            if (name, dtype) in self._lacking:
                continue
            self.teller.phase(label(name, dtype, size))
            began = time.monotonic()
            try:
                wrong = self.one(name, _DTYPES.get(dtype, torch.float32), size)
                self.device.sync()
            except (RuntimeError, NotImplementedError, ValueError) as exc:
                if not _UNSUPPORTED.search(str(exc)) or _FAILED.search(str(exc)):
                    raise
                self._lacking.add((name, dtype))
                why = str(exc).splitlines()[0][:120]
                self.teller.say({"t": "left_out", "check": f"{name} {dtype}".strip(), "why": why})
                continue
            for what in wrong:
                self.teller.say({"t": "wrong", "what": {**what, "check": label(name, dtype, size)}})
            seconds = round(time.monotonic() - began, 4)
            self.teller.say({"t": "check", "check": label(name, dtype, size), "result": {"seconds": seconds}})

    def plan(self) -> Iterator[tuple[str, str, int]]:
        yield "barrier", "", 0
        for size in sorted(self.sizes):
            for dtype in _DTYPES:
                for name in self._ways:
                    if self.world == 1 and name == "send_recv":
                        continue
                    heavy = self.device.kind == "cpu" and size > _HEAVY and not self.asked
                    if heavy and (name not in _HEAVY_ONES or dtype != "fp32"):
                        continue
                    yield name, dtype, size
        yield "barrier", "", 0

    def one(self, name: str, dtype: torch.dtype, size: int) -> list[Wrong]:
        """Run one collective over `size` bytes and say what of the result is wrong."""
        if name == "barrier":
            dist.barrier()
            return []
        count = max(1, size // dtype.itemsize)
        return self._ways[name](self, dtype, count, max(1, count // self.world))

    # The patterns

    def part(self, rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """What rank `rank` puts in: `count` values; `salt` tells its chunks apart."""
        return self._long(self._base(rank, salt), count, dtype)

    def total(self, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
        """The sum of what all ranks put in."""
        if salt not in self._sums:
            self._sums[salt] = sum((self._base(rank, salt) for rank in range(self.world)), torch.zeros(()))
        return self._long(self._sums[salt], count, dtype)

    def _base(self, rank: int, salt: int) -> torch.Tensor:
        if (rank, salt) not in self._bases:
            if len(self._bases) > 4096:
                self._bases.clear()
            groups = -(-self.world // 64)  # of many ranks only some put in something at each place, to keep sums small
            most = 256 // -(-self.world // groups)
            place = torch.arange(_PERIOD, dtype=torch.int64)
            mixed = (place + 1) * (rank * 31 + salt * 101 + 17) + place * place * (rank % 7 + 1)
            values = mixed % _PERIOD % most + 1
            self._bases[rank, salt] = torch.where((place + rank) % groups == 0, values, 0).to(torch.float32)
        return self._bases[rank, salt]

    def _long(self, base: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        base = base.to(self.device.torch_device, dtype)
        return base.repeat(-(-count // _PERIOD))[:count]

    # The collectives

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), -1.0, dtype=dtype, device=self.device.torch_device)

    def _all_reduce(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        data = self.part(self.rank, count, dtype)
        dist.all_reduce(data)
        return self._wrong_sum(data, 0)

    def _reduce(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        root = self.world - 1
        data = self.part(self.rank, count, dtype)
        dist.reduce(data, root)
        return self._wrong_sum(data, 0) if self.rank == root else []

    def _broadcast(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        root = count % self.world
        data = self.part(root, count, dtype) if self.rank == root else self._empty(count, dtype)
        dist.broadcast(data, root)
        return self._wrong_part(data, root, 0)

    def _all_gather(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        data = self._empty(chunk * self.world, dtype)
        dist.all_gather_into_tensor(data, self.part(self.rank, chunk, dtype))
        return [
            wrong for rank, one in enumerate(data.view(self.world, chunk)) for wrong in self._wrong_part(one, rank, 0)
        ]

    def _gather(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        root = 0
        parts = [self._empty(chunk, dtype) for _ in range(self.world)] if self.rank == root else None
        dist.gather(self.part(self.rank, chunk, dtype), parts, root)
        return [wrong for rank, one in enumerate(parts or ()) for wrong in self._wrong_part(one, rank, 0)]

    def _scatter(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        root = self.world - 1
        parts = None
        if self.rank == root:
            parts = [self.part(root, chunk, dtype, salt=rank + 1) for rank in range(self.world)]
        data = self._empty(chunk, dtype)
        dist.scatter(data, parts, root)
        return self._wrong_part(data, root, self.rank + 1)

    def _reduce_scatter(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        parts = torch.cat([self.part(self.rank, chunk, dtype, salt=rank + 1) for rank in range(self.world)])
        data = self._empty(chunk, dtype)
        dist.reduce_scatter_tensor(data, parts)
        return self._wrong_sum(data, self.rank + 1)

    def _all_to_all(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        parts = torch.cat([self.part(self.rank, chunk, dtype, salt=rank + 1) for rank in range(self.world)])
        data = self._empty(chunk * self.world, dtype)
        dist.all_to_all_single(data, parts)
        return [
            wrong
            for rank, one in enumerate(data.view(self.world, chunk))
            for wrong in self._wrong_part(one, rank, self.rank + 1)
        ]

    def _send_recv(self, dtype: torch.dtype, count: int, chunk: int) -> list[Wrong]:
        """To the next rank, and from the one before."""
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        data = self._empty(count, dtype)
        moves = [
            dist.P2POp(dist.isend, self.part(self.rank, count, dtype), after),
            dist.P2POp(dist.irecv, data, before),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
        return self._wrong_part(data, before, 0)

    _ways: dict[str, Callable[[Collectives, torch.dtype, int, int], list[Wrong]]] = {  # noqa: RUF012
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "reduce": _reduce,
        "gather": _gather,
        "scatter": _scatter,
        "send_recv": _send_recv,
    }

    # What is wrong with a result

    def _wrong_part(self, got: torch.Tensor, source: int, salt: int) -> list[Wrong]:
        self.device.sync()  # NCCL only queues: the wait for others is to be seen here, and not in a comparison
        want = self.part(source, got.numel(), got.dtype, salt)
        return [] if torch.equal(got, want) else [{"source": source, **_difference(got, want)}]

    def _wrong_sum(self, got: torch.Tensor, salt: int) -> list[Wrong]:
        self.device.sync()
        want = self.total(got.numel(), got.dtype, salt)
        if torch.equal(got, want):
            return []
        return [{"source": self._whose(got, want, salt), **_difference(got, want)}]

    def _whose(self, got: torch.Tensor, want: torch.Tensor, salt: int) -> int | None:
        """Whose part of a sum is missing, or there twice, where it is exactly one rank's."""
        if got.numel() < 16:  # a few values fit onto anybody's
            return None
        off = got.to(torch.float32) - want.to(torch.float32)
        fits = []
        for rank in range(self.world):
            part = self.part(rank, got.numel(), torch.float32, salt)
            if torch.equal(off, -part) or torch.equal(off, part):
                fits.append(rank)
        return fits[0] if len(fits) == 1 else None


def label(name: str, dtype: str, size: int) -> str:
    """`all_reduce fp32 64 MiB`"""
    if not dtype:
        return name
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{name} {dtype} {size // factor} {unit}"
    return f"{name} {dtype} {size} B"


def _difference(got: torch.Tensor, want: torch.Tensor) -> Wrong:
    places = (got != want).nonzero().flatten()
    first = int(places[0])
    return {
        "count": int(places.numel()), "of": got.numel(), "index": first,
        "got": float(got[first]), "want": float(want[first]),
    }  # fmt: skip
