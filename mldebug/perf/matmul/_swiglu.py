"""best_swiglu(): the width of a gated MLP, near the one asked for, whose products are fastest."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mldebug.core.errors import UsageError
from mldebug.core.report import Report, paint
from mldebug.perf.matmul._advice import last_wave
from mldebug.perf.matmul._model import ModelShapes
from mldebug.perf.matmul._peaks import canonical_dtype
from mldebug.perf.matmul._shapes import Matmul, Shape, distinct

_MOST = 64  # sizes that are measured
_ALIGNED = 256  # a multiple of this suits all tiles; of a rank's part half of it is asked for
_EQUAL = 0.99  # rates above this share of the best are as good: the one nearest to what was asked for is taken


@dataclass(frozen=True)
class Size:
    """A width: `multiple` is what it shares with 256, or with 128 times the ranks under TP; `tflops` the rate of
    the MLP's products, forward and backward, `ms` their time for a layer; None where nothing was measured."""

    intermediate: int
    multiple: int
    tflops: float | None
    ms: float | None
    busy: float | None


@dataclass(frozen=True)
class SwigluReport(Report):
    """Widths near `asked`, the best first: by measurement, or by their multiples where there is no device."""

    hidden: int
    asked: int
    tokens: int
    tp: int
    dtype: str
    device: str
    measured: bool
    sizes: tuple[Size, ...]

    @property
    def best(self) -> int:
        """The intermediate size to take."""
        return self.sizes[0].intermediate

    def line(self) -> str:
        """`best 11264: +1.0% TFLOPS over 11008, ...`, or that the size asked for is best."""
        return f"best {self.best}{self._gain()}" if self.best != self.asked else f"{self.asked} is best near itself"

    def text(self, color: bool = False, width: int = 80) -> str:
        where = f" on {self.device}" if self.device and self.measured else ""
        tp = f", tp {self.tp}" if self.tp > 1 else ""
        how = f"measured with {self.tokens} tokens{where}" if self.measured else "by rule, nothing was measured"
        lines = textwrap.wrap(f"hidden {self.hidden}, intermediate near {self.asked}{tp}, {self.dtype}: {how}", width)
        lines += textwrap.wrap(self.line(), width)
        lines.append(f"{'size':>8}{'multiple of':>13}{'TFLOPS':>9}{'ms a layer':>12}")
        shown = list(self.sizes[:8])
        shown += [one for one in self.sizes[8:] if one.intermediate == self.asked]
        for one in shown:
            rate = "-" if one.tflops is None else f"{one.tflops:.4g}"
            took = "-" if one.ms is None else f"{one.ms:.4g}"
            asked = "  asked for" if one.intermediate == self.asked else ""
            lines.append(f"{one.intermediate:>8}{one.multiple:>13}{rate:>9}{took:>12}{asked}")
        if len(shown) < len(self.sizes):
            lines.append(f"and {len(self.sizes) - len(shown)} more, which come after these")
        text = "\n".join(lines)
        return paint(text) if color else text

    def _gain(self) -> str:
        first = self.sizes[0]
        asked = next((one for one in self.sizes if one.intermediate == self.asked), None)
        if asked is None or asked is first:
            return ""
        if first.tflops is None or asked.tflops is None or first.ms is None or asked.ms is None:
            return f", the nearest multiple of {first.multiple}; {self.asked} is one of {asked.multiple}"
        rate, time = first.tflops / asked.tflops - 1, first.ms / asked.ms - 1
        weights = first.intermediate / asked.intermediate - 1
        return f": {rate:+.1%} TFLOPS over {self.asked}, and {time:+.1%} time for {weights:+.1%} weights"


def best_swiglu(
    hidden: int,
    near: int = 0,
    *,
    tp: int = 1,
    tokens: int = 8192,
    distance: int = 0,
    step: int = 0,
    dtype: str = "bfloat16",
    measure: bool | None = None,
    rates: Mapping[Shape, float] | None = None,
) -> SwigluReport:
    """The fastest intermediate size of a gated MLP (SwiGLU, GeGLU) near `near` (default: 8/3 of `hidden`).

    Sizes are those within `distance` (default: an eighth of `near`) that are multiples of `step` (default: 64 for each
    of `tp` ranks), and `near` itself. All three products of the MLP are measured, forward and backward, with `tokens`
    rows, where there is an accelerator; `measure` says yes or no to that. `rates` are TFLOPS by (m, n, k, batch) that
    are known already. Of sizes within 1% of the fastest the nearest is best; without a measurement the nearest multiple
    of 256, or of 128 for each of several ranks. Wrong sizes are a UsageError.

        best_swiglu(4096, measure=False).best  # 11008
    """
    near = near or int(8 * hidden / 3)
    for what, value in (("hidden", hidden), ("near", near), ("tp", tp), ("tokens", tokens)):
        if not 0 < value < 1 << 31:
            raise UsageError(f"{what} is {value}", "give a whole number of 1 or more")
    dtype = canonical_dtype(dtype)
    sizes = _near(near, distance or max(64 * tp, near // 8), step or 64 * tp)
    products = {size: _products(hidden, size, tp, tokens) for size in sizes}
    device = ""
    if rates is None and measure is not False:
        rates, device = _measured([one for each in products.values() for one in each], dtype, bool(measure))
    found = [_size(size, tp, products[size], rates or {}, device) for size in sizes]
    if rates is not None:
        found = [one for one in found if one.tflops is not None] or found
        top = max(one.tflops or 0.0 for one in found)
        found.sort(key=lambda one: -(one.tflops or 0.0))
        found.sort(key=lambda one: abs(one.intermediate - near) if (one.tflops or 0.0) >= _EQUAL * top else math.inf)
    else:
        found.sort(key=lambda one: (-one.multiple, abs(one.intermediate - near)))
    return SwigluReport(hidden, near, tokens, tp, dtype, device, rates is not None, tuple(found))


def swiglu_of(model: ModelShapes, *, dtype: str = "bfloat16", measure: bool | None = None) -> SwigluReport | None:
    """best_swiglu() for the MLP of a model, or of its experts with their share of tokens; None where there is no gate.

    swiglu_of(model_shapes("llama-7b"), measure=False).best  # 11008
    """
    lay = model.layout
    if not lay.gated:
        return None
    inter, tokens = lay.inter, model.tokens
    if not lay.dense_layers:
        inter, tokens = lay.expert_inter, max(1, round(model.tokens * lay.top_k / lay.experts))
    step = 128 * model.tp  # half as many as best_swiglu() takes, as this comes beside other measurements
    return best_swiglu(lay.hidden, inter, tp=model.tp, tokens=tokens, step=step, dtype=dtype, measure=measure)


def _near(near: int, distance: int, step: int) -> list[int]:
    """`near` and the multiples of `step` around it; those that are nearest, if there are too many to measure."""
    around = range(max(step, -(-(near - distance) // step) * step), near + distance + 1, step)
    nearest = sorted(around, key=lambda size: abs(size - near))[: _MOST - 1]
    return sorted({near, *nearest})


def _products(hidden: int, intermediate: int, tp: int, tokens: int) -> tuple[Matmul, Matmul]:
    part = math.ceil(intermediate / tp)
    return Matmul("gate, up", tokens, part, hidden, count=2), Matmul("down", tokens, hidden, part)


def _measured(matmuls: Sequence[Matmul], dtype: str, here: bool) -> tuple[dict[Shape, float] | None, str]:
    """Rates from the accelerator; from the CPU only when asked for it."""
    from mldebug.core.device import find_device
    from mldebug.perf.matmul._measure import measure

    device = find_device()
    if device.kind == "cpu" and not here:
        return None, ""
    rates = measure(distinct(matmuls), dtype=dtype, device=device)
    return {(m, n, k, rest[0] if rest else 1): rate for (m, n, k, *rest), rate in rates.items()}, device.name


def _size(intermediate: int, tp: int, matmuls: Sequence[Matmul], rates: Mapping[Shape, float], device: str) -> Size:
    seconds = 0.0
    for one in matmuls:
        for each in (one, *one.backward()):
            rate = rates.get(each.shape, 0.0)
            seconds += each.flops / (rate * 1e12) if rate > 0 else math.inf
    flops = 3 * sum(one.flops for one in matmuls)
    known = math.isfinite(seconds)
    return Size(
        intermediate=intermediate,
        multiple=math.gcd(intermediate, _ALIGNED if tp == 1 else _ALIGNED // 2 * tp),
        tflops=flops / seconds / 1e12 if known else None,
        ms=seconds * 1e3 if known else None,
        busy=last_wave(matmuls[0], device),
    )
