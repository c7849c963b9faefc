"""mfu(): how much of what the GPUs can do a training run does, from its tokens per second."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.report import Report, paint
from mldebug.perf.matmul._model import ModelShapes, model_shapes
from mldebug.perf.matmul._peaks import Accelerator, accelerator, canonical_dtype, known_devices
from mldebug.perf.matmul._references import mamf_references

RECOMPUTE = ("none", "attention", "full")
ATTENTION = ("full", "causal")


@dataclass(frozen=True)
class MfuReport(Report):
    """What a run reaches. `ok` is False for more than the device can do: then an input is wrong.

        report = mfu(81920, "llama2-7b", gpus=8, device="h100"); report.mfu, report.tflops  # 0.477, 471.9

    - `mfu`, `hfu`, `mamfu`: shares of 1, of the peak (`hfu` also counts what is computed again) and of the measured
      ceiling; None where what they compare with is not known
    - `tflops`: TFLOPS that the model needs, for each GPU
    - `peak`, `mamf`: TFLOPS of a GPU, the data sheet's and the matmul ceiling, None where not known; `peak_source`,
      `mamf_source`: who says so
    - `flops_per_token`: FLOP of forward and backward; `attention_per_token`: the part of scores and values;
      `other_attention`: FLOP a token where pairs of positions are counted the other way (`attention` is this one)
    - `six_n`: FLOP a token by the approximation 6N, with N the `active_params`
    - `params`, `active_params`: parameters of the model, and those that a token meets, its embedding included
    - `tokens_per_second`: of all `gpus`; `seq`: tokens of a sequence; `assumed`: what the config did not say
    """

    model: str
    gpus: int
    device: str
    dtype: str
    seq: int
    attention: str
    recompute: str
    tokens_per_second: float
    flops_per_token: float
    attention_per_token: float
    six_n: float
    params: float
    active_params: float
    tflops: float
    peak: float | None
    peak_source: str
    mfu: float | None
    hfu: float | None
    mamf: float | None
    mamf_source: str
    mamfu: float | None
    other_attention: float
    assumed: str

    @property
    def ok(self) -> bool:
        """False for more than the device can do: then an input is wrong."""
        return not self._impossible()

    def _impossible(self) -> bool:
        """More than the peak, or clearly more than the ceiling that was given for this device."""
        own = self.mamfu if self.mamfu is not None and self.mamf_source.startswith("given") else 0.0
        return max(self.mfu or 0.0, self.hfu or 0.0) > 1.0 or own > 1.05

    def text(self, color: bool = False, width: int = 80) -> str:
        where = f" on {self.gpus} x {self.device}" if self.device else f" on {self.gpus} GPU{'s'[: self.gpus - 1]}"
        lines = [f"{self.model}{where}, {self.dtype}, {self.seq} tokens a sequence"]
        rows = [*self._shares(), ("work", self._work()), ("", self._approximation()), ("attention", self._other())]
        if self.assumed:
            rows.append(("assumed", self.assumed))
        for label, value in rows:
            lines.append(textwrap.fill(f"{label:<11}{value}", width, subsequent_indent=" " * 11))
        lines += textwrap.wrap(hint, width) if (hint := self._hint()) else []
        text = "\n".join(lines)
        return paint(text) if color else text

    def _hint(self) -> str:
        if self._impossible():
            return (
                "hint: more than the device can do. Is one of these wrong: tokens per second (of all GPUs together), "
                "the number of GPUs, the length of sequences, the dtype, the ceiling?"
            )
        if self.peak is None and self.mamf is None:
            known = f"Known are {', '.join(known_devices())}"
            if self.device:
                return f"hint: nothing is known of {self.device!r}: give its peak in TFLOPS with --peak. {known}"
            return f"hint: no GPU is seen here: name the one that it ran on with --device, or give --peak. {known}"
        if (self.mamfu or 0.0) > 1.0:
            return (
                "hint: more than others reached on this kind of GPU. `mldebug mamf -o mamf.json` measures its own "
                "ceiling, and --mamf mamf.json takes it; else the tokens per second or the number of GPUs may be wrong"
            )
        if not self.mamf_source.startswith("given"):
            return "hint: `mldebug mamf -o mamf.json` measures this GPU's own ceiling, and --mamf mamf.json takes it"
        return ""

    def _shares(self) -> list[tuple[str, str]]:
        rate = f"{self.tflops:.4g} TFLOPS a GPU"
        rows = []
        if self.mfu is None:
            rows.append(("MFU", f"{rate}; the peak of this device is not known"))
        else:
            rows.append(("MFU", f"{_percent(self.mfu)}  {rate} of {self.peak:g}, the peak ({self.peak_source})"))
        if self.hfu is not None and self.recompute != "none":
            what = "the forward" if self.recompute == "full" else "the scores and values of attention"
            rows.append(("HFU", f"{_percent(self.hfu)}  with {what} computed again in the backward"))
        if self.mamfu is not None:
            rows.append(("MAMFU", f"{_percent(self.mamfu)}  of {self.mamf:g}, the matmul ceiling ({self.mamf_source})"))
        return rows

    def _work(self) -> str:
        weights = self.flops_per_token - self.attention_per_token
        return (
            f"{_giga(self.flops_per_token)} GFLOP a token, forward and backward: {_giga(weights)} with weights, "
            f"{_giga(self.attention_per_token)} attention"
        )

    def _approximation(self) -> str:
        off = self.six_n / self.flops_per_token - 1
        active = f"{self.active_params / 1e9:.3g} B parameters"
        if self.active_params < 0.99 * self.params:
            active = f"{self.active_params / 1e9:.3g} B active of {self.params / 1e9:.3g} B parameters"
        return f"6N says {_giga(self.six_n)} ({off:+.1%}) with N = {active}"

    def _other(self) -> str:
        if self.attention == "full":
            return f"over all pairs of positions; only those under the causal mask: {self._with_other()}"
        return f"only pairs under the causal mask; over all pairs: {self._with_other()}"

    def _with_other(self) -> str:
        if self.mfu is None:
            return f"{self.tflops * self.other_attention / self.flops_per_token:.4g} TFLOPS"
        return f"MFU {_percent(self.mfu * self.other_attention / self.flops_per_token).strip()}"


def mfu(
    tokens_per_second: float,
    model: str | os.PathLike[str] | Mapping[str, Any],
    *,
    gpus: int = 1,
    device: str = "",
    dtype: str = "bfloat16",
    seq: int = 0,
    attention: str = "full",
    recompute: str = "none",
    peak: float | None = None,
    mamf: float | str | os.PathLike[str] | None = None,
) -> MfuReport:
    """Model FLOPS utilization of a training run: MFU against the theoretical peak, MAMFU against a measured ceiling.

    `tokens_per_second` are those of all `gpus` together. `model` is what `model_shapes` takes, `seq` the length of the
    sequences in tokens (default: the longest of the config, 4096 at most). `device` is the GPU's name (default: the
    one here). `attention` counts all pairs of positions ("full", as PaLM and most do) or those that the mask leaves
    ("causal"). `recompute` is for activation checkpointing: "full" computes the forward again, "attention" only scores
    and values; that counts for HFU alone. `peak` is TFLOPS instead of the table's. `mamf` is TFLOPS, or the
    file that `mldebug mamf -o` wrote; by default what others measured, sustained where that is known.

    Forward and backward are three forwards, of each product 2mnk operations; of experts those that a token meets.
    Wrong values are a UsageError.

        mfu(3200 * 64, "llama2-7b", gpus=64, seq=4096, device="NVIDIA H100 80GB HBM3").mfu
    """
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        raise UsageError(f"tokens_per_second is {tokens_per_second}", "give those of all GPUs together")
    if not 0 < gpus <= 1 << 24:
        raise UsageError(f"gpus is {gpus}", "give the number of GPUs of the job")
    for what, value, known in (("attention", attention, ATTENTION), ("recompute", recompute, RECOMPUTE)):
        if value not in known:
            raise UsageError(f"{what} is {value!r}", f"one of {', '.join(known)}")
    dtype = canonical_dtype(dtype)
    shapes = model_shapes(model, seq=seq)
    device = device or _device_here()
    kind = accelerator(device)
    peak, peak_source = _peak(peak, kind, dtype)
    ceiling, ceiling_source = _ceiling(mamf, device, dtype)
    per_token = {one: _per_token(shapes, one) for one in ATTENTION}
    needed = per_token[attention]
    tflops = tokens_per_second * needed / gpus / 1e12
    done = tflops * (1 + _again(shapes, attention, recompute) / needed)
    return MfuReport(
        model=shapes.name,
        gpus=gpus,
        device=kind.name if kind else device,
        dtype=dtype,
        seq=shapes.seq,
        attention=attention,
        recompute=recompute,
        tokens_per_second=float(tokens_per_second),
        flops_per_token=needed,
        attention_per_token=3 * shapes.attention_flops(causal=attention == "causal") / shapes.tokens,
        six_n=6 * shapes.active_params,
        params=shapes.params,
        active_params=shapes.active_params,
        tflops=tflops,
        peak=peak,
        peak_source=peak_source,
        mfu=tflops / peak if peak else None,
        hfu=done / peak if peak else None,
        mamf=ceiling,
        mamf_source=ceiling_source,
        mamfu=tflops / ceiling if ceiling else None,
        other_attention=per_token[ATTENTION[1 - ATTENTION.index(attention)]],
        assumed=shapes.assumed,
    )


def _per_token(shapes: ModelShapes, attention: str) -> float:
    return shapes.flops(causal=attention == "causal", backward=True) / shapes.tokens


def _again(shapes: ModelShapes, attention: str, recompute: str) -> float:
    """Operations a token that the backward repeats of the forward. The head is never checkpointed."""
    if recompute == "none":
        return 0.0
    causal = attention == "causal"
    again = shapes.attention_flops(causal=causal)
    if recompute == "full":
        again = shapes.flops(causal=causal) - shapes.matmuls[-1].flops
    return again / shapes.tokens


def _device_here() -> str:
    """The name of the accelerator of this process; "" without one, as no CPU trains what this is asked about."""
    from mldebug.core.device import find_device

    found = find_device()
    return "" if found.kind == "cpu" else found.name


def _peak(given: float | None, kind: Accelerator | None, dtype: str) -> tuple[float | None, str]:
    if given is not None:
        return _positive("peak", given), "given"
    if kind is None or dtype not in kind.tflops:
        return None, ""
    return kind.tflops[dtype], kind.source


def _ceiling(given: float | str | os.PathLike[str] | None, device: str, dtype: str) -> tuple[float | None, str]:
    if isinstance(given, (int, float)):
        return _positive("mamf", given), "given"
    if given is not None:
        return _measured(Path(given), dtype), f"given by {os.fspath(given)}"
    found = mamf_references(device, dtype, "sustained") or mamf_references(device, dtype)
    if not found:
        return None, ""
    about = "about that, " if found[0].approximate else ""
    return found[0].tflops, f"{about}{found[0].method}: {found[0].source}"


def _measured(path: Path, dtype: str) -> float:
    """The sustained figure of `mldebug mamf`: of its --json, or of the report among the lines that -o wrote."""
    hint = "give TFLOPS, or what `mldebug mamf -o FILE` wrote"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = (exc.strerror or str(exc)).lower() if isinstance(exc, OSError) else "it is no text"
        raise UsageError(f"cannot read {path}: {reason}", hint) from exc
    found = [report for line in lines if isinstance(report := _parsed(line), dict) and report.get("sustained")]
    if not found:
        raise UsageError(f"{path} has no report of mldebug mamf", hint)
    of, value = found[-1].get("dtype"), found[-1]["sustained"]
    if of != dtype:
        raise UsageError(
            f"{path} is of {of}, and the job computes in {dtype}", f"`mldebug mamf --dtype {dtype} -o FILE`"
        )
    return _positive("mamf", value)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:  # the last line of a run that was killed
        return None


def _positive(what: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise UsageError(f"{what} is {value}", "give TFLOPS above 0")
    return float(value)


def _percent(share: float) -> str:
    return f"{100 * share:5.1f}%"


def _giga(flops: float) -> str:
    """Operations in 10^9 with four digits."""
    return f"{flops / 1e9:.4g}"
