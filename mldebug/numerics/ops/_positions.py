"""Positions that a short dtype cannot tell apart: 257 is 256 in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

_WHOLE = {torch.bfloat16: 2**8, torch.float16: 2**11}  # whole numbers up to here are exact
_MAX = 1 << 22  # elements that are looked at


def lost_positions(base: str, operands: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """The result of an arange, of a cast of 0, 1, 2, ..., or of a sum of ones, whose neighbours are no longer distinct.

    Positions may run along any dimension. Nothing else gives a result.
    """
    if base not in ("arange", "to_copy", "copy", "cumsum") or not results:
        return []
    result = results[0]
    exact = _WHOLE.get(result.dtype)
    if exact is None or result.numel() > _MAX:
        return []
    source = next((t for t in operands if t.shape == result.shape and t is not result), None)
    for dim in [dim for dim, size in enumerate(result.shape) if size > exact]:
        if base != "arange" and (source is None or not _counts(base, source, dim)):
            continue
        if bool((result.detach().double().diff(dim=dim) == 0).any()):
            return [result]
    return []


def _counts(base: str, source: Tensor, dim: int) -> bool:
    """Whether somewhere along a dimension a tensor holds whole numbers, each one more than the last; or ones to sum."""
    values = source.detach()
    if base == "cumsum":
        return bool((values == 1).all(dim=dim).any())
    if source.dtype in _WHOLE or source.dtype is torch.bool:
        return False
    values = values.double()
    return bool(((values.diff(dim=dim) == 1).all(dim=dim) & (values == values.round()).all(dim=dim)).any())
