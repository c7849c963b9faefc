"""How far two tensors are apart, whatever their dtypes, and however the ranks hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics.runs._compare_run import Piece
from mldebug.numerics.runs._recording_tensor import sample_places, unpacked

# What the outputs of one module may differ by, relative to their scale, if its inputs agree. In the short dtypes about
# ten times what rounding a result gives, in the long ones what long sums in another order give. Above it are real
# causes: tf32 gives 3e-4.
TOLERANCE = {
    "float64": 1e-12,
    "float32": 1e-5,
    "float16": 2.5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.3,
    "float8_e5m2": 0.6,
}
_EPS = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3, "float8_e4m3fn": 0.125}
JUMP = 5.0  # a module whose output error is so many times that of its inputs made it
_MASKED = -1e4


def coarser(one: str, other: str) -> str:
    """The dtype of lower precision of two; "" for what is no float of the table."""
    known = [dtype for dtype in (one, other) if dtype in TOLERANCE]
    return max(known, key=lambda dtype: TOLERANCE[dtype], default="")


def drift_limit(dtype: str) -> float:
    """What small differences may grow to over a whole model: twice the root of the dtype's eps, half of its digits."""
    return 2 * math.sqrt(_EPS.get(dtype, 0.25))


@dataclass(frozen=True)
class Difference:
    """`error` is relative to the tensor's scale: the larger of rms(a - b) / rms and max|a - b| / (4 max).

    For whole numbers it is the share of elements that differ. `exact`: every bit is the same.
    """

    error: float
    scale: tuple[float, float]
    dtypes: tuple[str, str]
    sampled: bool = False
    exact: bool = False
    whole_numbers: bool = False


class Layouts:
    """How the ranks' local tensors make up the whole one, where they do not say it themselves: found on the way."""

    def __init__(self) -> None:
        self.interleaved: bool | None = None
        self.padding: Tensor | None = None  # (batch, length): where there are tokens, and no padding
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def difference(a: list[Piece], b: list[Piece], layouts: Layouts) -> Difference | None:
    """Compare the same tensor of two runs, as their ranks have it. None where it cannot be compared."""
    if not a or not b or any(piece.line.get("odd") for piece in (*a, *b)):
        return None
    left, right = a[0].line, b[0].line
    kinds = [_kind(line["dtype"]) for line in (left, right)]
    if "bool" in kinds and kinds[0] != kinds[1]:
        return None  # a mask written in two ways
    if len(a) == len(b) and all(_same_local(x, y) for x, y in zip(a, b, strict=True)):
        found = [_pair(x, y, layouts) for x, y in zip(a, b, strict=True)]
        return max(found, key=lambda one: _order(one.error))
    values_a, values_b = _global(a, right["shape"], layouts), _global(b, left["shape"], layouts)
    if not values_a or not values_b:
        return None
    pairs = [(x, y) for x in values_a for y in values_b if x.shape == y.shape]
    pairs = [pair for pair in pairs if not (pair[0].sampled or pair[1].sampled)] or pairs
    if not pairs:
        return None
    found = []
    for x, y in pairs:
        scales = {"rms": _rms(x.values)}, {"rms": _rms(y.values)}
        found.append(_measure(x.values, y.values, left | scales[0], right | scales[1], x.sampled or y.sampled))
    best = min(range(len(found)), key=lambda i: _order(found[i].error))
    if len(pairs) > 1 and layouts.interleaved is None:
        layouts.interleaved = any(one.order == "interleaved" for one in pairs[best])
    return found[best]


@dataclass(frozen=True)
class _Values:
    values: Tensor  # float64, flat
    shape: tuple[int, ...]
    sampled: bool
    order: str = ""  # how batches of ranks were put together


def _pair(a: Piece, b: Piece, layouts: Layouts) -> Difference:
    x, y = _sample(a.line), _sample(b.line)
    same = a.line["bits"] == b.line["bits"] and a.line["dtype"] == b.line["dtype"] and _equal(x, y)
    whole_a, whole_b = (None, None) if same else (a.whole(), b.whole())
    sampled = not same and (whole_a is None or whole_b is None)
    if whole_a is not None and whole_b is not None:
        x, y = _flat(whole_a), _flat(whole_b)
    tokens = None if same else _tokens(a.line["shape"], sampled, layouts)
    if tokens is not None:
        x, y = x[tokens], y[tokens]
    return _measure(x, y, a.line, b.line, sampled, exact=same)


def _tokens(shape: list[int], sampled: bool, layouts: Layouts) -> Tensor | None:
    """Which of the values belong to tokens: rows of padding may hold anything, and differ between implementations."""
    padding = layouts.padding
    if padding is None or list(padding.shape) != shape[:2]:
        return None
    layouts.note("rows of padding, by attention_mask, were left out")
    width, flat = max(1, math.prod(shape[2:])), padding.reshape(-1)
    return flat[_places(math.prod(shape)) // width] if sampled else flat.repeat_interleave(width)


def _rms(values: Tensor) -> float:
    fine = values[values.isfinite()]
    return float(fine.double().square().mean().sqrt()) if fine.numel() else 0.0


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(12345.0), y.nan_to_num(12345.0))


def _measure(
    x: Tensor, y: Tensor, a: dict[str, Any], b: dict[str, Any], sampled: bool, exact: bool = False
) -> Difference:
    scale = (float(a["rms"]), float(b["rms"]))
    dtypes = (str(a["dtype"]), str(b["dtype"]))
    whole = all(_kind(dtype) != "float" for dtype in dtypes)
    if whole:
        error = float((x != y).double().mean()) if x.numel() else 0.0
    else:
        error = _float_error(_limits(x, dtypes[0]), _limits(y, dtypes[1]))
    exact = exact or (not sampled and dtypes[0] == dtypes[1] and error == 0.0)
    return Difference(error, scale, dtypes, sampled, exact, whole)


def _float_error(x: Tensor, y: Tensor) -> float:
    masked = ((x == -math.inf) | (y == -math.inf)) & (x <= _MASKED) & (y <= _MASKED)
    same = masked | (x == y) | (x.isnan() & y.isnan())
    x, y = x[~masked & (~same | x.isfinite())], y[~masked & (~same | y.isfinite())]
    if not x.numel():
        return 0.0
    if not bool(x.isfinite().all() and y.isfinite().all()):
        return math.inf
    apart, largest = (x - y).abs(), max(float(x.abs().max()), float(y.abs().max()))
    if largest == 0.0:
        return 0.0
    rms = max(float(x.square().mean().sqrt()), float(y.square().mean().sqrt()))
    return max(float(apart.square().mean().sqrt()) / rms, float(apart.max()) / largest / 4) if rms else 0.0


def _limits(values: Tensor, dtype: str) -> Tensor:
    """Masks are written as -inf or as the dtype's lowest number."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return values
    return torch.where(values <= 0.99 * torch.finfo(found).min, -math.inf, values)


def _global(pieces: list[Piece], shape: list[int], layouts: Layouts) -> list[_Values]:
    """The whole tensor that the ranks hold together, in each way it may be; `shape` is that of the other run."""
    first = pieces[0]
    if first.line.get("shard"):
        value = _from_shards(pieces)
        return [] if value is None else [value]
    local = first.line["shape"]
    if len(pieces) == 1 or local == shape:
        if len(pieces) > 1 and math.prod(local) == 1 and layouts.interleaved is not None:
            mean = torch.stack([_sample(piece.line) for piece in pieces]).mean(dim=0)
            layouts.note("the mean over the ranks of single numbers was compared, as each rank has its own samples")
            return [_Values(mean, tuple(local), False)]
        return _alone(first)
    return _put_together(pieces, shape, layouts)


def _alone(piece: Piece) -> list[_Values]:
    shape, whole = tuple(piece.line["shape"]), piece.whole()
    if whole is not None:  # as a sample too: of the other side there may be no more
        flat = _flat(whole)
        return [_Values(flat, shape, False), _Values(flat[_places(flat.numel())], (-1, *shape), True)]
    return [_Values(_sample(piece.line), (-1, *shape), True)]


def _put_together(pieces: list[Piece], shape: list[int], layouts: Layouts) -> list[_Values]:
    shapes = [piece.line["shape"] for piece in pieces]
    if any(len(one) != len(shape) for one in shapes):
        return []
    dims = [d for d in range(len(shape)) if any(one[d] != shape[d] for one in shapes)]
    if len(dims) != 1 or sum(one[dims[0]] for one in shapes) != shape[dims[0]]:
        return []
    wholes = [piece.whole() for piece in pieces]
    values = [value for value in wholes if value is not None]
    if len(values) < len(wholes):
        layouts.note("parts of ranks larger than full_bytes could not be put together: record with a larger one")
        return []
    found = []
    if dims[0] != 0 or layouts.interleaved is not True:
        found.append(_Values(_flat(torch.cat(values, dim=dims[0])), tuple(shape), False, "in turn"))
    if dims[0] == 0 and len({value.shape for value in values}) == 1 and layouts.interleaved is not False:
        turns = torch.stack(values, dim=1).reshape(shape)
        found.append(_Values(_flat(turns), tuple(shape), False, "interleaved"))
    if dims[0] == 0 and layouts.interleaved is None:
        layouts.note("the samples of the ranks together are taken for the batch of the run of one process")
    return found


def _from_shards(pieces: list[Piece]) -> _Values | None:
    """Put a DTensor together again from what each rank wrote: its place, and the mesh axes over which it is a sum."""
    line = pieces[0].line
    shape, shard = line["shape"], line["shard"]
    if shard["reduce"] not in (None, "sum", "avg"):
        return None
    copies = [axis for axis, one in enumerate(shard["placements"]) if one.startswith("R")]
    pieces = [p for p in pieces if not any(p.line["shard"]["coordinate"][axis] for axis in copies)]
    parts = 1
    for axis in shard["sums"]:
        parts *= len({p.line["shard"]["coordinate"][axis] for p in pieces})
    divisor = parts if shard["reduce"] == "avg" else 1
    wholes = [piece.whole() for piece in pieces]
    filled = [
        value is not None or 0 in piece.line["shard"]["local"] for value, piece in zip(wholes, pieces, strict=True)
    ]
    if all(filled):
        total, count = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape)
        for value, piece in zip(wholes, pieces, strict=True):
            if value is not None:
                place = tuple(
                    slice(at, at + size) for at, size in zip(piece.line["shard"]["offset"], value.shape, strict=True)
                )
                total[place] += value.double() / divisor
                count[place] += 1
        if not bool((count == parts).all()):
            return None  # a rank is missing
        return _Values(total.reshape(-1), tuple(shape), False)
    places = sample_places(math.prod(shape))
    sample, seen = torch.zeros(len(places), dtype=torch.float64), torch.zeros(len(places))
    for piece in pieces:
        index = torch.tensor(piece.line.get("sampled", []), dtype=torch.int64)
        sample[index] += _sample(piece.line) / divisor
        seen[index] += 1
    return _Values(sample, (-1, *shape), True) if bool((seen == parts).all()) else None


def _same_local(a: Piece, b: Piece) -> bool:
    shards = a.line.get("shard"), b.line.get("shard")
    return bool(a.line["shape"] == b.line["shape"]) and (shards == (None, None) or shards[0] == shards[1])


def _places(count: int) -> Tensor:
    return torch.tensor(sample_places(count), dtype=torch.int64)


def _flat(value: Tensor) -> Tensor:
    return value.reshape(-1).double()


def _sample(line: dict[str, Any]) -> Tensor:
    return unpacked(line["sample"], line["wide"])


def _kind(dtype: str) -> str:
    return "bool" if dtype == "bool" else "int" if "int" in dtype else "float"


def _order(error: float) -> float:
    return math.inf if math.isnan(error) else error
