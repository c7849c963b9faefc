"""Where statistics are kept: a ring of slots per device. HostRing for the CPU, TorchRing where there is no Triton.

All rings share one index space, so the order of records across devices is the order of their indices. CudaRing adapts
the Triton ring of `_triton_ring` to any plain tensor.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mldebug.numerics._tell import warn
from mldebug.numerics.ring._stats import LIMIT, NEAR, TINY, Stats, full
from mldebug.numerics.ring._triton_ring import DTYPES, TritonRing

_COPY = 8 << 20  # bytes that are copied at a time, to measure a tensor with gaps
SLOTS = 1 << 16  # circular part; a GPT-2 124M step takes about 320
_INF = math.inf


class Ring(Protocol):
    """What the recorder asks of a ring.

    Tensors are plain (see `_tensors.parts`), non-empty and on the ring's device. NaN and +inf set the alarm; -inf does
    with `strict`, for tensors that are no masks.
    """

    def record(self, tensor: Tensor, slot: int, strict: bool = False) -> None: ...
    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None: ...
    def reset(self, first: int, count: int) -> None: ...
    def publish(self, first: int, count: int) -> None: ...
    def flag(self, wait: bool) -> tuple[int, int] | None: ...
    def clear_flag(self) -> None: ...
    def stats(self, slots: Sequence[int]) -> list[Stats]: ...


class HostRing:
    """Statistics of CPU tensors. Reading an extreme costs no wait there, so an alarm is known at once."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._slots = slots
        self._lo = array("d", bytes(8 * slots))
        self._hi = array("d", bytes(8 * slots))
        self._detail: dict[int, Stats] = {}  # of alarmed slots, all statistics: the tensor may change later
        self._alarm = self._near = -1

    def record(self, tensor: Tensor, slot: int, strict: bool = False) -> None:
        tensor = tensor.detach()
        low, high = torch.aminmax(tensor)  # one read-only pass; NaN if there is a NaN
        lo = self._lo[slot] = low.item()
        hi = self._hi[slot] = high.item()
        if self._detail:
            self._detail.pop(slot, None)
        if not hi < _INF or (strict and lo == -_INF):
            if self._alarm < 0:
                self._alarm = slot
                self._detail[slot] = full(tensor)
        elif self._near < 0:
            near = NEAR[tensor.dtype]
            if hi >= near or (lo <= -near and lo > -LIMIT[tensor.dtype]):
                self._near = slot
        if hi < 16 * TINY[tensor.dtype] and lo > -16 * TINY[tensor.dtype] and (hi or lo) and len(self._detail) < 256:
            self._detail[slot] = full(tensor)  # tiny throughout: now the count of subnormals is worth a closer look

    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None:
        for i, tensor in enumerate(tensors):
            self.record(tensor, (base + i) % self._slots, strict)

    def reset(self, first: int, count: int) -> None:
        """Nothing to do: record() overwrites."""

    def publish(self, first: int, count: int) -> None:
        """Nothing to do: the values are on the host."""

    def flag(self, wait: bool) -> tuple[int, int] | None:
        return self._alarm, self._near

    def clear_flag(self) -> None:
        self._alarm = self._near = -1
        self._detail.clear()

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        return [self._detail.get(i) or _host_stats(self._lo[i], self._hi[i]) for i in slots]


def _host_stats(lo: float, hi: float) -> Stats:
    # abs min is known from the extremes alone when all elements have one sign.
    absmin = lo if lo >= 0 else -hi if hi <= 0 else math.nan
    return Stats(lo, hi, absmin)


class TorchRing:
    """Statistics by torch's own reductions, kept on the device until they are asked for: any accelerator."""

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        self._slots = slots
        self._device = device
        self._values = torch.zeros(slots, 2, dtype=torch.float32, device=device)
        self._host = torch.zeros(slots, 2, dtype=torch.float32)
        self._limits = array("f", bytes(4 * slots))
        self._strict = bytearray(slots)
        self._pending: list[tuple[int, int]] = []
        self._alarm = self._near = -1

    def record(self, tensor: Tensor, slot: int, strict: bool = False) -> None:
        self._limits[slot] = min(LIMIT[tensor.dtype], LIMIT[torch.float32])
        self._strict[slot] = strict
        self._values[slot].copy_(extremes_pair(tensor.detach()))

    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None:
        for i, tensor in enumerate(tensors):
            self.record(tensor, (base + i) % self._slots, strict)

    def reset(self, first: int, count: int) -> None:
        """Nothing to do: record() overwrites."""

    def publish(self, first: int, count: int) -> None:
        self._pending.append((first % self._slots, count))

    def flag(self, wait: bool) -> tuple[int, int] | None:
        if not wait:
            return None  # a wait is all that these devices offer; it is paid where waiting is allowed
        for first, count in self._pending:
            for a, b in spans(first, count, self._slots):
                self._host[a:b] = self._values[a:b].cpu()
                self._look(a, b)
        self._pending.clear()
        return self._alarm, self._near

    def _look(self, a: int, b: int) -> None:
        for slot, (lo, hi) in enumerate(self._host[a:b].tolist(), a):
            limit = self._limits[slot]
            if not hi < _INF or (self._strict[slot] and lo == -_INF):
                self._alarm = slot if self._alarm < 0 else self._alarm
            elif self._near < 0 and limit and (hi >= limit / 4 or (lo <= -limit / 4 and lo > -limit)):
                self._near = slot

    def clear_flag(self) -> None:
        self._alarm = self._near = -1

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        return [_host_stats(*self._host[i].tolist()) for i in slots]


class CudaRing:
    """The Triton ring for tensors of any plain dtype and layout."""

    def __init__(self, device: torch.device, slots: int = TritonRing.SLOTS) -> None:
        self._ring = TritonRing(device, slots)
        self.reset = self._ring.reset
        self.publish = self._ring.publish
        self.flag = self._ring.flag
        self.clear_flag = self._ring.clear_flag
        self.copy_rows = self._ring.copy_rows

    def record(self, tensor: Tensor, slot: int, strict: bool = False, reset: bool = False) -> None:
        if tensor.dtype not in DTYPES:
            tensor = extremes_pair(tensor.detach())
        elif not tensor.is_contiguous():
            for part in pieces(tensor.detach()):
                self._ring.record(part, slot, strict=strict, reset=reset)
                reset = False
            return
        self._ring.record(tensor, slot, strict=strict, reset=reset)

    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None:
        ready = [t if t.is_contiguous() else dense(t.detach()) for t in tensors]
        ready = [t if t.dtype in DTYPES else extremes_pair(t.detach()) for t in ready]
        self._ring.record_many(ready, base, strict=strict)

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        return [Stats(*found) for found in self._ring.read(slots)]


def ring_for(device: torch.device) -> Ring:
    """The best ring for a device that tensors were met on."""
    if device.type == "cpu":
        return HostRing()
    if TritonRing.available(device):
        try:
            return CudaRing(device)
        except Exception as error:  # Triton cannot compile here (no C compiler, say)
            warn(
                f"mldebug: Triton does not work here ({type(error).__name__}: {error}); measuring by torch, slower\n"
                "hint: install a C compiler and the Python headers"
            )
    return TorchRing(device)


def dense(tensor: Tensor, copy: bool = True) -> Tensor:
    """A contiguous tensor of the same values (in any order, repeated ones once); a view wherever that is possible.

    Without `copy`, where it is not, a view that is not contiguous.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.contiguous() if copy else tensor


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Contiguous tensors that together hold the values of one; where they must be copied, a small part at a time."""
    if tensor.nbytes <= _COPY or (dim := next((d for d, n in enumerate(tensor.shape) if n > 1), None)) is None:
        yield dense(tensor)
    elif (whole := dense(tensor, copy=False)).is_contiguous():
        yield whole
    else:
        for half in tensor.chunk(2, dim):
            yield from pieces(half)


def extremes_pair(tensor: Tensor) -> Tensor:
    """[min, max] as float32 on the tensor's device without a host read; float64 is clamped, so that only inf is inf."""
    pair = torch.stack(torch.aminmax(tensor))
    if tensor.dtype is torch.float64:
        limit = LIMIT[torch.float32]
        pair = torch.where(pair.isfinite(), pair.clamp(-limit, limit), pair)
    return pair.to(torch.float32)


def spans(first: int, count: int, slots: int) -> list[tuple[int, int]]:
    """The one or two slices [a, b) that a range of a ring is made of."""
    first %= slots
    if first + count <= slots:
        return [(first, first + count)]
    return [(first, slots), (0, first + count - slots)]
