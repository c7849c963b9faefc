"""One operation with copies of its operands, so that it can run again after the event."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import parts
from mldebug.numerics.ops._op_names import RUNNING, base_name, results_for_backward
from mldebug.numerics.ops._operands import changed_by, tensors_in

MAX_KEPT = 256 << 20  # bytes of operands that are kept of one step
_SPARSE = 4  # a view that covers more than so many times its elements is copied without its strides


@dataclass
class KeptCall:
    """`func` with its operands as they were before it ran; `rng` is the random state of an operation that draws.

    `rows` says which slice of the operands this is, where they were too large to be kept whole.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rng: dict[str, Tensor] = field(default_factory=dict)
    rows: str = ""

    @property
    def nbytes(self) -> int:
        return _size((*self.args, *self.kwargs.values()))

    def run(self, args: Sequence[Any] | None = None) -> list[Tensor]:
        """The results that count, of `args` in place of its own if these are given: not what is only for backward.

        What it changes is copied first, and is the result of an operation that returns nothing.
        """
        given = self.args if args is None else args
        changed = {id(tensor) for tensor in changed_by(self.func, given, self.kwargs)}
        given = [_renewed(value, changed) for value in given]
        named = {name: _renewed(value, changed) for name, value in self.kwargs.items()}
        results, base = list(tensors_in(self.func(*given, **named))), base_name(str(self.func))
        results = results[:1] if results_for_backward(base) else results
        return results + changed_by(self.func, given, named) if base in RUNNING or not results else results


def keep_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor], rng: dict[str, Tensor],
    room: int = MAX_KEPT,
) -> KeptCall | str:  # fmt: skip
    """The operation to keep, or the reason why not. Operands of more than `room` bytes are cut to a bad row."""
    if getattr(func, "_schema", None) is None:
        return f"{func} has no schema"
    size = _size((*args, *kwargs.values()))
    if size <= room:
        known: dict[int, Tensor] = {}
        held = tuple(_held(value, known) for value in args)
        return KeptCall(func, held, {name: _held(value, known) for name, value in kwargs.items()}, rng)
    cut = _cut(func, args, kwargs, results, room)
    return cut or f"its operands take {size >> 20} MB, more than the {room >> 20} MB that are kept"


def random_state(func: Any, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The state of torch's generators before an operation that draws from them; empty for all others."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return {}
    found = {"torch.cpu": torch.get_rng_state()}
    for index in sorted({t.device.index for t in tensors if t.is_cuda}):
        found[f"torch.cuda.{index}"] = torch.cuda.get_rng_state(index)
    return found


def replaced(value: Any, before: dict[int, Tensor]) -> Any:
    """The same arguments with what a tensor held before an operation changed it."""
    if isinstance(value, Tensor):
        return before.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(replaced(item, before) for item in value)
    return value


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, overlapping ones included."""
    plain = tensor.detach()
    local = getattr(plain, "_local_tensor", None)  # of a DTensor: what this rank has
    plain = plain if local is None else local
    if plain.layout is not torch.strided or plain.is_nested or plain.is_quantized:
        return plain.clone()
    plain = plain.resolve_conj().resolve_neg()
    length = span(plain)
    if plain.is_contiguous() or not length or length > _SPARSE * plain.numel():
        return plain.clone(memory_format=torch.contiguous_format)
    return extent(plain).clone().as_strided(plain.size(), plain.stride())


def extent(tensor: Tensor) -> Tensor:
    """The stretch of memory that a strided tensor covers, as one dimension."""
    return tensor.as_strided((span(tensor),), (1,))


def span(tensor: Tensor) -> int:
    """How many elements there are from the first to the last in memory: fewer than its own where it is expanded."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor.numel()
    return 1 + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))


def _held(value: Any, known: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in known:  # one tensor that is two operands stays one
            known[id(value)] = copied(value)
        return known[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_held(item, known) for item in value)
    return value


def _renewed(value: Any, changed: set[int]) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if id(value) in changed else value
    if type(value) in (list, tuple):
        return type(value)(_renewed(item, changed) for item in value)
    return value


def _size(values: Any) -> int:
    seen: set[int] = set()
    total = 0
    for value in values:
        for tensor in tensors_in(value):
            if id(tensor) not in seen and not tensor.is_meta:
                seen.add(id(tensor))
                total += min(tensor.numel(), span(tensor)) * tensor.element_size()
    return total


def _cut(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor], room: int
) -> KeptCall | None:
    """One row (entry of the first dimension) of the operands whose result is bad too; found out by running it."""
    result = next((t for t in results if t.dim()), None)
    row = None if result is None else _bad_row(result)
    if result is None or row is None or changed_by(func, args, kwargs):
        return None
    for most in (len(args) + len(kwargs), 1):  # all operands with so many rows, as in a sum; or the first, of a product
        like, left = (result.dim(), result.shape[0]), [most]
        few = tuple(_row_of(value, row, like, left) for value in args)
        named = {name: _row_of(value, row, like, left) for name, value in kwargs.items()}
        if _size((*few, *named.values())) > room:
            continue
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            shown = next(tensors_in(func(*few, **named)))
            if shown.dim() and shown.shape[0] == 1 and _bad_row(shown) is not None:
                kept = keep_call(func, few, named, (), {}, room)
                if isinstance(kept, KeptCall):
                    kept.rows = f"row {row} of {result.shape[0]}, as all operands take more than {room >> 20} MB"
                    return kept
    return None


def _row_of(value: Any, row: int, like: tuple[int, int], left: list[int]) -> Any:
    if isinstance(value, Tensor) and left[0] and value.dim() and (value.dim(), value.shape[0]) == like:
        left[0] -= 1
        return value.detach()[row : row + 1]
    return value


def _bad_row(tensor: Tensor) -> int | None:
    pieces = parts(tensor)
    if len(pieces) != 1 or pieces[0].shape[0] != tensor.shape[0]:
        return None
    bad = ~torch.isfinite(pieces[0]).reshape(tensor.shape[0], -1).all(dim=-1)
    return int(bad.int().argmax()) if bool(bad.any()) else None
