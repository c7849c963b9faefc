"""What the matrix products of a model reach on a device: each one's rate, its time, and what to change."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from mldebug.core.report import Report, paint
from mldebug.perf.matmul._advice import Advice, advise, last_wave
from mldebug.perf.matmul._model import ModelShapes
from mldebug.perf.matmul._peaks import canonical_dtype, theoretical_tflops
from mldebug.perf.matmul._shapes import Matmul, Shape, distinct
from mldebug.perf.matmul._swiglu import SwigluReport


@dataclass(frozen=True)
class Product:
    """One product of the model. Rates are TFLOPS, None where it was not measured; `step_ms` is the time of all its
    calls of a step, forward and backward; `share` its rate over both as a share of the ceiling."""

    name: str
    shape: Shape
    count: float
    forward: float | None
    backward: float | None
    share: float | None
    step_ms: float | None
    busy: float | None


@dataclass(frozen=True)
class ModelReport(Report):
    """A model on a device: `rate` is the mean TFLOPS of what was measured, `share` that of the ceiling `mamf`.

    `layer_ms`, `head_ms` and `step_ms` are times of matrix products alone, forward and backward, on one rank.
    """

    model: str
    device: str
    dtype: str
    seq: int
    batch: int
    tp: int
    products: tuple[Product, ...]
    rate: float | None
    mamf: float | None
    share: float | None
    best_mfu: float | None
    layer_ms: float | None
    head_ms: float | None
    step_ms: float | None
    missing: int
    advice: tuple[Advice, ...]
    swiglu: SwigluReport | None
    assumed: str

    @property
    def ok(self) -> bool:
        """False where a size must be changed for tensor cores or TP to work well."""
        return not any(one.level == "must" for one in self.advice)

    def text(self, color: bool = False, width: int = 80) -> str:
        tp = f", tp {self.tp}" if self.tp > 1 else ""
        lines = [f"{self.model}: {self.batch} x {self.seq} tokens{tp}, {self.dtype}"]
        lines += [*self._table(), *self._sums(width)]
        for one in self.advice:
            mark = "advice" if one.level == "must" else "could"
            lines.append(textwrap.fill(f"{mark:<9}{one.line()}", width, subsequent_indent=" " * 9))
        if not self.advice:
            lines.append(f"{'advice':<9}none: all sizes are multiples of what tensor cores and tiles want")
        if self.swiglu is not None:
            lines.append(textwrap.fill(f"{'swiglu':<9}{self.swiglu.line()}", width, subsequent_indent=" " * 9))
        if self.assumed:
            lines.append(f"{'assumed':<9}{self.assumed}")
        text = "\n".join(lines)
        return paint(text) if color else text

    def _table(self) -> list[str]:
        lines = [f"{'product':<19}{'MxNxK':<24}{'forward':>8}{'backward':>9}{'of MAMF':>9}{'ms a step':>11}"]
        for one in self.products:
            m, n, k, batch = one.shape
            size = f"{m}x{n}x{k}" + (f" x{batch}" if batch > 1 else "")
            cells = f"{_rate(one.forward):>8}{_rate(one.backward):>9}{_share(one.share):>9}{_ms(one.step_ms):>11}"
            lines.append(f"{one.name[:18]:<19}{size:<24}{cells}")
        return lines

    def _sums(self, width: int) -> list[str]:
        if self.rate is None:
            return []
        said = f"{self.rate:.4g} TFLOPS over all products"
        if self.share is not None:
            said += f", {100 * self.share:.1f}% of the MAMF ({self.mamf:.4g})"
        if self.best_mfu is not None:
            said += f": with nothing else to do the MFU would be {100 * self.best_mfu:.1f}%"
        times = f"a layer {_ms(self.layer_ms)} ms, the head {_ms(self.head_ms)} ms, a step {_ms(self.step_ms)} ms"
        rows = [("all", said), ("time", f"{times}: products alone, forward and backward")]
        if any(one.shape[3] > 1 for one in self.products):
            rows.append(("note", "scores and values as batched products over all pairs; fused attention is faster"))
        if self.missing:
            rows.append(("note", f"{self.missing} products were not measured: too large for the memory, or no time"))
        return [textwrap.fill(f"{label:<9}{value}", width, subsequent_indent=" " * 9) for label, value in rows]


def model_report(
    model: ModelShapes,
    measured: Mapping[Shape, float],
    *,
    dtype: str = "bfloat16",
    device_name: str = "",
    mamf: float | None = None,
    swiglu: SwigluReport | None = None,
) -> ModelReport:
    """What a model's products reach, from their measured rates.

    `measured` has TFLOPS by (m, n, k, batch), of `to_measure(model)` or a part of it; `mamf` is the ceiling in TFLOPS
    that shares are of, `swiglu` what `swiglu_of(model)` found, to be shown with it.

        print(model_report(model, rates, mamf=730).text())
    """
    dtype = canonical_dtype(dtype)
    products = tuple(_product(one, measured, device_name, mamf) for one in model.matmuls)
    known = [(one, matmul) for one, matmul in zip(products, model.matmuls, strict=True) if one.step_ms is not None]
    times = [one.step_ms or 0.0 for one, _ in known]
    flops = 3 * sum(matmul.flops for _, matmul in known)
    step = math.fsum(times) if known else None
    rate = flops / (step * 1e9) if step else None
    peak = theoretical_tflops(device_name, dtype)
    complete = len(known) == len(products)
    head = products[-1].step_ms
    layers = model.layout.layers + model.layout.encoder_layers
    return ModelReport(
        model=model.name,
        device=device_name,
        dtype=dtype,
        seq=model.seq,
        batch=model.batch,
        tp=model.tp,
        products=products,
        rate=rate,
        mamf=mamf,
        share=rate / mamf if rate and mamf else None,
        best_mfu=rate / peak if rate and peak and complete else None,
        layer_ms=(step - head) / layers if step and head is not None and complete else None,
        head_ms=head,
        step_ms=step if complete else None,
        missing=len(products) - len(known),
        advice=advise(model, dtype=dtype),
        swiglu=swiglu,
        assumed=model.assumed,
    )


def to_measure(model: ModelShapes, backward: bool = True) -> list[Shape]:
    """The distinct (m, n, k, batch) of a model, those of its backward too: what `model_report` wants rates of.

    to_measure(model_shapes("llama-7b", seq=4096))
    """
    return distinct(model.matmuls, backward)


def _product(one: Matmul, measured: Mapping[Shape, float], device_name: str, mamf: float | None) -> Product:
    each = one.flops / one.count  # operations of a call, the same in all three directions
    forward = measured.get(one.shape)
    back = [measured.get(other.shape) for other in one.backward()]
    seconds = [each / (rate * 1e12) for rate in (forward, *back) if rate]
    both = 2 * each / sum(seconds[1:]) / 1e12 if len(seconds) == 3 else None
    total = sum(seconds) * one.count * 1e3 if len(seconds) == 3 else None
    mean = 3 * each / sum(seconds) / 1e12 if len(seconds) == 3 else forward
    return Product(
        name=one.name,
        shape=one.shape,
        count=one.count,
        forward=forward,
        backward=both,
        share=mean / mamf if mean and mamf else None,
        step_ms=total,
        busy=last_wave(one, device_name),
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 100 else f"{value:.3g}"
