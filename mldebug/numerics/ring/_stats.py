"""The statistics of one tensor and what they mean: fine, bad, a mask, close to the limit."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT: dict[torch.dtype, float] = {
    dtype: torch.finfo(dtype).max
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
# "Overflow ahead": within two binary orders of the limit.
NEAR: dict[torch.dtype, float] = {dtype: limit / 4 for dtype, limit in LIMIT.items()}
TINY: dict[torch.dtype, float] = {dtype: torch.finfo(dtype).tiny for dtype in LIMIT}
SUBNORMAL_SHARE = 0.25  # a share of subnormal elements from which an output is called underflowing


class Stats(NamedTuple):
    """Statistics of one tensor. lo and hi are signed extremes, NaN where the tensor holds one and no counts were made.

    Counts are -1 where they were not taken (the hot path on CPU reads only the extremes), absmin likewise is NaN.
    """

    lo: float
    hi: float
    absmin: float = math.nan
    nan: int = -1
    posinf: int = -1
    neginf: int = -1
    zero: int = -1
    subnormal: int = -1

    @property
    def has_nan(self) -> bool:
        return self.nan > 0 or self.lo != self.lo or self.hi != self.hi

    def alarms(self, strict: bool = False) -> bool:
        """NaN or +inf. An extreme of -inf alone is how masks are written: it alarms only where no mask can be."""
        return self.has_nan or self.hi == math.inf or (strict and self.lo == -math.inf)

    @property
    def mask(self) -> bool:
        """-inf and nothing worse."""
        return self.lo == -math.inf and not self.alarms()

    @property
    def absmax(self) -> float:
        """Largest magnitude; NaN if there is a NaN, as torch's max has it."""
        return math.nan if self.has_nan else max(abs(self.lo), abs(self.hi))

    def near(self, dtype: torch.dtype) -> bool:
        """Close to the dtype's limit, a finfo.min (a mask again) not counted."""
        near, limit = NEAR.get(dtype, math.inf), LIMIT.get(dtype, math.inf)
        if self.alarms():
            return False
        return near <= self.hi < math.inf or (-math.inf < self.lo <= -near and self.lo != -limit)

    def line(self, name: str) -> str:
        """One line of a frame: abs min, abs max, name, in the classic format."""
        absmax = self.absmax
        absmin = math.nan if self.has_nan else self.absmin
        low = f"{absmin:8.2e}" if absmin == absmin or absmax != absmax else f"{'-':>8}"
        return f"{low} {absmax:8.2e} {name}"


_CHUNK = 1 << 24  # elements: the copies that the counts need stay small beside the tensor


def full(tensor: Tensor) -> Stats:
    """All statistics of a plain, non-empty tensor. Several passes and a host read: not for the hot path."""
    if tensor.numel() > _CHUNK:
        flat = tensor.reshape(-1)
        rows = [full(flat[start : start + _CHUNK]) for start in range(0, flat.numel(), _CHUNK)]
        absmin = min(row.absmin if row.absmin == row.absmin else math.inf for row in rows)
        counts = [sum(column) for column in zip(*(row[3:] for row in rows), strict=True)]
        return Stats(min(row.lo for row in rows), max(row.hi for row in rows), absmin, *map(int, counts))
    nan = torch.isnan(tensor)
    posinf, neginf = torch.isposinf(tensor), torch.isneginf(tensor)
    finite = torch.where(nan, torch.zeros((), dtype=tensor.dtype, device=tensor.device), tensor)
    lo, hi = torch.aminmax(finite)
    absolute = tensor.abs()
    tiny = torch.finfo(tensor.dtype).tiny
    counts = torch.stack(
        [x.sum(dtype=torch.int64) for x in (nan, posinf, neginf, absolute == 0, (absolute > 0) & (absolute < tiny))]
    ).tolist()
    return Stats(lo.item(), hi.item(), absolute.min().item(), *counts)


def finite_absmax(tensor: Tensor) -> float:
    """Largest finite magnitude of a plain tensor; 0.0 if none is finite."""
    return torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
