"""What is put into the buffers, and what has to come out: patterns that each dtype holds exactly, at any world size.

A pattern is a period that is repeated over the buffer. Its length is no divisor of a power of two, so that data that
lands at another place is seen; and everything is made and compared on the device, in pieces.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_PERIOD = 1 << 18  # elements, about
_PIECE = 1 << 26  # elements that are compared at a time
_LEVELS = 5  # values of reductions are 1 to 5, which 8 bits hold
_BASE = {"sum": 0, "avg": 0, "max": 0, "prod": 1, "min": 7}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def fill(buffer: Any, period: Any, start: int = 0) -> None:
    """Repeat `period` over a flat buffer, whose first element is element `start` of the whole."""
    length = period.numel()
    start %= length
    if start:
        head = min(length - start, buffer.numel())
        buffer[:head].copy_(period[start : start + head])
        buffer = buffer[head:]
    whole = buffer.numel() // length
    if whole:
        buffer[: whole * length].view(whole, length).copy_(period.expand(whole, length))
    rest = buffer[whole * length :]
    if rest.numel():
        rest.copy_(period[: rest.numel()])


def count_wrong(buffer: Any, period: Any, start: int = 0, share: float = 0.0) -> int:
    """How many elements are not as `fill()` would have made them; `share` is the relative error that is allowed."""
    length = period.numel()
    wrong = torch.zeros((), dtype=torch.int64, device=buffer.device)
    start %= length
    if start:
        head = min(length - start, buffer.numel())
        wrong += _differs(buffer[:head], period[start : start + head], share).sum()
        buffer = buffer[head:]
    rows = max(1, _PIECE // length)
    whole = buffer.numel() // length
    for row in range(0, whole, rows):
        many = min(rows, whole - row)
        piece = buffer[row * length : (row + many) * length].view(many, length)
        wrong += _differs(piece, period.expand(many, length), share).sum()
    rest = buffer[whole * length :]
    wrong += _differs(rest, period[: rest.numel()], share).sum()
    return int(wrong)


def _differs(found: Any, wanted: Any, share: float) -> Any:
    if share:
        return ~torch.isclose(found.to(torch.float64), wanted.to(torch.float64), rtol=share, atol=0.0)
    if found.element_size() == 1:
        return found.view(torch.uint8) != wanted.view(torch.uint8)
    return found != wanted


def timed_period(rank: int, world: int, dtype: Any, device: Any) -> Any:
    """What is in the buffers while they are timed: numbers that look random and sum to zero over the ranks.

    So an in-place reduction that is repeated hundreds of times ends at zero, and never at infinity.
    """
    generator = torch.Generator().manual_seed(7)
    if dtype.is_floating_point:
        values = torch.rand(_PERIOD, generator=generator) * 2 - 1
    else:
        values = torch.randint(-1, 2, (_PERIOD,), generator=generator).to(torch.float32)
    alone = world % 2 == 1 and rank == world - 1
    sign = 0.0 if alone else 1.0 if rank % 2 == 0 else -1.0
    values = values * sign
    return (values.abs() if dtype == torch.uint8 else values).to(dtype).to(device)


class Moved:
    """For collectives that only move data: `of(sender)` is what this rank puts in, another for each sender."""

    def __init__(self, turn: int, dtype: Any, device: Any) -> None:
        name = str(dtype).removeprefix("torch.")
        self.modulus = 7 if name in _FLOAT8 else 113 if name in ("int8", "uint8") else 251
        self.turn, self.dtype, self.device = turn, dtype, device

    def of(self, sender: int) -> Any:
        length = self.modulus * (_PERIOD // self.modulus)
        places = torch.arange(length, device=self.device, dtype=torch.int32)
        # Two senders that are a multiple of the modulus apart have steps of their own.
        step = 1 + sender // self.modulus % (self.modulus - 1)
        values = (places * step + 3 * sender + 5 * self.turn) % self.modulus
        return values.to(torch.float32).to(self.dtype) if self.dtype.is_floating_point else values.to(self.dtype)


class Reduced:
    """For reductions: each element comes from one rank alone, and the others put in what changes nothing.

    So the result is small and exact whatever the number of ranks; each rank's part is in some of the elements.
    """

    def __init__(self, turn: int, world: int, op: str, dtype: Any, device: Any) -> None:
        self.world, self.op, self.dtype = world, op, dtype
        unit = math.lcm(_LEVELS, world)
        places = torch.arange(unit * max(1, _PERIOD // unit), device=device, dtype=torch.int64)
        self.values = (1 + (places + turn) % _LEVELS).to(torch.float32)
        self.owner = (places + turn) % world

    def of(self, sender: int) -> Any:
        base = torch.full_like(self.values, float(_BASE[self.op]))
        return torch.where(self.owner == sender, self.values, base).to(self.dtype)

    def result(self) -> tuple[Any, float]:
        """(what has to come out, the relative error that is allowed)."""
        if self.op != "avg":
            return self.values.to(self.dtype), 0.0
        if not self.dtype.is_floating_point:
            return (self.values.to(torch.int64) // self.world).to(self.dtype), 0.0
        share = 4 * torch.finfo(self.dtype).eps
        return (self.values / self.world).to(self.dtype), share
