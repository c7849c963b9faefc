"""Which sizes of a model do not suit the hardware: multiples that tensor cores and tiles want, and what TP divides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mldebug.perf.matmul._layout import Layout
from mldebug.perf.matmul._model import ModelShapes
from mldebug.perf.matmul._peaks import accelerator, canonical_dtype
from mldebug.perf.matmul._shapes import Matmul


@dataclass(frozen=True)
class Advice:
    """A size to change: `value` is what the model has, `better` the nearest that suits, `level` "must" or "could"."""

    what: str
    value: int
    better: int
    level: str
    why: str

    def line(self) -> str:
        """`vocab 50257 -> 50304: ...`, for people."""
        to = f" -> {self.better}" if self.better != self.value else ""
        return f"{self.what} {self.value}{to}: {self.why}"


def advise(model: ModelShapes, *, dtype: str = "bfloat16") -> tuple[Advice, ...]:
    """What to pad or to divide otherwise, what costs most first. Empty where all sizes suit.

    The rules are those of NVIDIA's guide to matrix multiplication: rows of 16 bytes or tensor cores are fed badly,
    rows of 128 bytes are best, and a tile is 128 wide. They hold for a rank's part under TP as well.

        advise(model_shapes("gpt2"))[0].line()  # vocab 50257 -> 50304: ...
    """
    size = _BYTES.get(canonical_dtype(dtype), 2)
    lay, tp = model.layout, model.tp
    found = list(_divisions(lay, tp))
    for what, value, ranks in _widths(lay, tp):
        found += _padding(what, value, ranks, size)
    found += _head_dim(lay, size)
    return tuple(sorted(found, key=lambda one: one.level != "must"))


def best_multiple(size_of_number: float) -> int:
    """The multiple that widths should be of: numbers in 128 bytes, at most a tile of 128."""
    return min(128, int(128 / size_of_number))


def last_wave(matmul: Matmul, device_name: str, tile: tuple[int, int] = (128, 256)) -> float | None:
    """The share of the device that a product keeps busy, if it is cut into such tiles: 1 where its last wave is full.

    None for a device whose number of SMs is not known. Libraries choose among tiles, so this is an estimate.

        last_wave(Matmul("up", 4096, 11008, 4096), "NVIDIA H100 80GB HBM3")
    """
    kind = accelerator(device_name)
    if kind is None or not kind.sms:
        return None
    tiles = matmul.batch * math.ceil(matmul.m / tile[0]) * math.ceil(matmul.n / tile[1])
    return tiles / (math.ceil(tiles / kind.sms) * kind.sms)


_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "mxfp8": 1,
          "mxfp4": 0.5, "nvfp4": 0.5}  # fmt: skip


def _widths(lay: Layout, tp: int) -> list[tuple[str, int, int]]:
    """The sizes that are a side of some product, each with the number of ranks that share it."""
    found = [("vocab", lay.vocab, tp), ("hidden", lay.hidden, 1)]
    if lay.dense_layers:
        found.append(("intermediate", lay.inter, tp))
    if lay.moe_layers:
        found.append(("expert intermediate", lay.expert_inter, tp))
    if lay.shared_inter:
        found.append(("shared expert intermediate", lay.shared_inter, tp))
    found += [(what, value, 1) for what, value in (("q_lora_rank", lay.q_rank), ("kv_lora_rank", lay.kv_rank)) if value]
    return found


def _divisions(lay: Layout, tp: int) -> list[Advice]:
    """What TP cannot divide: a rank gets more than the others, or the framework refuses."""
    if tp == 1:
        return []
    found = []
    if lay.heads % tp:
        found.append(Advice("heads", lay.heads, _up(lay.heads, tp), "must", f"tp {tp} does not divide them"))
    if lay.kv_heads == lay.heads:
        return found
    if lay.kv_heads % tp and tp % lay.kv_heads:
        found.append(Advice("kv heads", lay.kv_heads, _up(lay.kv_heads, tp), "must", f"tp {tp} does not divide them"))
    elif lay.kv_heads < tp and not lay.kv_rank:
        why = f"fewer than tp {tp}: each is computed on {tp // lay.kv_heads} ranks"
        found.append(Advice("kv heads", lay.kv_heads, lay.kv_heads, "could", why))
    return found


def _padding(what: str, value: int, tp: int, size: float) -> list[Advice]:
    if not value:
        return []
    least, best = max(1, int(16 / size)) * tp, best_multiple(size) * tp
    part = "" if tp == 1 else f" for each of {tp} ranks"
    better = _up(value, best)
    if value % tp:
        return [Advice(what, value, better, "must", f"tp {tp} does not divide it; {better} is a multiple of {best}")]
    if value % least:
        why = f"rows are no multiple of 16 bytes{part}, which tensor cores want; {better} is a multiple of {best}"
        return [Advice(what, value, better, "must", why)]
    if value % best:
        why = f"rows are no multiple of 128 bytes{part}; {better} is a multiple of {best}"
        return [Advice(what, value, better, "could", why)]
    return []


def _head_dim(lay: Layout, size: float) -> list[Advice]:
    """Attention kernels are made for heads of 64, 128 and 256 numbers, and compute others as the next of these."""
    if lay.kv_rank:
        return []
    dim = lay.head_dim
    better = next((usual for usual in (64, 128, 256) if dim <= usual), _up(dim, 64))
    if dim % max(1, int(16 / size)):
        return [Advice("head dim", dim, better, "must", "no multiple of 16 bytes, which fused attention asks for")]
    if dim != better and dim % 32:
        return [Advice("head dim", dim, better, "could", f"attention kernels compute it as {better}")]
    return []


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
