"""What is kept of one tensor: statistics, a checksum, a sample of its values, where a shard lies, or all of it."""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import is_plain

SAMPLE = 256
_CHUNK = 1 << 22  # elements that are widened at a time


def described(tensor: Tensor, wants: Callable[[int], bool]) -> tuple[dict[str, Any], Tensor | None]:
    """Plain JSON about `tensor`, and its local values on the CPU if `wants(bytes)` says so.

    A DTensor is described by its local shard, with the place of it in the whole. Other odd tensors (sparse, nested,
    quantized, without values) are described by their shape alone.
    """
    facts: dict[str, Any] = {"shape": list(tensor.shape), "dtype": short(tensor.dtype), "device": tensor.device.type}
    local = tensor.detach()
    if hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor"):
        facts["shard"] = _shard(tensor)
        local = tensor._local_tensor.detach()
    if local.is_meta or local.is_nested or local.is_quantized or local.layout is not torch.strided:
        return facts | {"odd": True}, None
    if not is_plain(local) and type(local) is not Tensor:
        local = local.as_subclass(Tensor)
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
        facts["complex"] = True
    whole = None
    if local.numel() and wants(local.numel() * local.element_size()):
        whole = local.to("cpu", copy=True).contiguous()
        local = whole
    return facts | _numbers(local, tensor.shape, facts.get("shard")), whole


def short(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=1024)
def sample_places(count: int) -> Sequence[int]:
    """Which elements of `count` are kept: spread over all of them, the same ones in every run and on every device.

    Multiples of the golden ratio: evenly spaced places would all lie in one column of a tensor whose width divides
    the distance.
    """
    if count <= SAMPLE:
        return range(count)
    return [((i * 2654435769) & 0xFFFFFFFF) * count >> 32 for i in range(SAMPLE)]


def expected_sample(shape: Sequence[int], is_complex: bool) -> int:
    """How many values are kept of a tensor of this shape."""
    return len(sample_places(math.prod(shape) * (2 if is_complex else 1)))


def unpacked(text: str, wide: bool) -> Tensor:
    """The values of a sample, as float64."""
    raw = bytearray(base64.b64decode(text))
    return torch.frombuffer(raw, dtype=torch.float64 if wide else torch.float32).double() if raw else torch.zeros(0)


def _numbers(local: Tensor, shape: torch.Size, shard: dict[str, Any] | None) -> dict[str, Any]:
    flat = local.reshape(-1)
    whole_shape = list(local.shape) if shard is None else list(shape)
    places, here = sample_places(math.prod(whole_shape)), None
    if shard is not None:
        here, places = _in_shard(places, whole_shape, shard["offset"], list(local.shape))
    wide = not local.dtype.is_floating_point or local.dtype is torch.float64
    index = torch.tensor(places, dtype=torch.int64, device=flat.device)
    picked = flat[index] if local.element_size() > 1 or not local.dtype.is_floating_point else flat.float()[index]
    values = picked.to("cpu", torch.float64 if wide else torch.float32)
    facts: dict[str, Any] = {"sample": base64.b64encode(values.numpy().tobytes()).decode(), "wide": wide}
    if here is not None:
        facts["sampled"] = here
    return facts | _statistics(flat)


def _statistics(flat: Tensor) -> dict[str, Any]:
    largest, squares, bad, bits, count = 0.0, 0.0, 0, 0, flat.numel()
    for start in range(0, count, _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = (bits + int(_bits(part).to(torch.int64).sum())) & (2**64 - 1)
        values = part.double() if part.device.type != "mps" else part.float()
        fine = values.isfinite()
        bad += int((~fine).sum())
        values = torch.where(fine, values, 0.0)
        largest = max(largest, float(values.abs().max()))
        squares += float(values.square().sum())
    return {"abs_max": largest, "rms": math.sqrt(squares / max(1, count - bad)), "bad": bad, "bits": bits}


def _bits(part: Tensor) -> Tensor:
    if part.dtype is torch.bool or not part.dtype.is_floating_point:
        return part
    return part.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])


def _shard(tensor: Any) -> dict[str, Any]:
    """Where the local values of a DTensor lie, in plain JSON, and over which axes of the mesh it is a sum of them."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    coordinate = list(mesh.get_coordinate() or [])
    sums = [axis for axis, placement in enumerate(tensor.placements) if placement.is_partial()]
    return {
        "placements": [str(placement) for placement in tensor.placements],
        "coordinate": coordinate,
        "offset": list(offset),
        "local": list(shape),
        "sums": sums,
        "reduce": next((str(tensor.placements[axis].reduce_op) for axis in sums), None),
    }


def _in_shard(
    places: Sequence[int], shape: list[int], offset: list[int], local: list[int]
) -> tuple[list[int], list[int]]:
    """Which of the sampled elements of the whole lie in this shard: their numbers in the sample, and their places."""
    here: list[int] = []
    mine: list[int] = []
    if 0 in local or len(local) != len(shape):
        return here, mine
    for number, place in enumerate(places):
        at, rest = [], place
        for size in reversed(shape):
            at.append(rest % size)
            rest //= size
        inner = [one - start for one, start in zip(reversed(at), offset, strict=True)]
        if all(0 <= one < size for one, size in zip(inner, local, strict=True)):
            flat = 0
            for one, size in zip(inner, local, strict=True):
                flat = flat * size + one
            here.append(number)
            mine.append(flat)
    return here, mine
