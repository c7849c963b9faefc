"""MamfReport: the ceiling of a device, the shape that reaches it, and how much the figure is worth."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mldebug.core.report import Report, paint
from mldebug.perf.matmul._blocks import Shape, shape_text
from mldebug.perf.matmul._peaks import theoretical_tflops
from mldebug.perf.matmul._references import mamf_references
from mldebug.perf.matmul._telemetry import TROUBLE

_NOISY = 0.02  # a spread above this is said


@dataclass(frozen=True)
class Figure:
    """One shape of the race: TFLOPS, its share of the reference shape, and in how many duels it was measured.

    `equal` says that the duels do not tell it from the winner.
    """

    shape: Shape
    tflops: float
    share: float
    duels: int
    equal: bool


@dataclass(frozen=True)
class Known:
    """What others measured on this kind of device by one method, in TFLOPS."""

    method: str
    tflops: float
    shape: Shape | None
    approximate: bool
    source: str


@dataclass(frozen=True)
class MamfReport(Report):
    """The maximum achievable matmul FLOPS of one device, in TFLOPS (10^12 FLOP/s, two for a multiply-add).

    `sustained` is the rate of `shape` back to back at a steady clock, `spread` the standard deviation of its blocks as
    a share of it; `burst` that of the first 5 ms after idling; `flushed` that with a flush of the cache before each
    call, as classic finders measure. `settled` is False where the run was ended before the figure was measured by
    itself; `ended` says by what. `steady` and `load` hold clocks, power and throttling while the winner ran alone and
    during the whole search. `others` are the runners-up, `also` what was measured beside the race, `model` the report
    on a model's shapes.
    """

    schema: ClassVar[int] = 1

    device: str
    device_kind: str
    index: int
    physical_index: int | None
    uuid: str
    host: str
    dtype: str
    scaling: str
    fast_accum: bool
    torch: str
    cuda: str
    seed: int
    mode: str
    shape: Shape
    sustained: float
    spread: float
    settled: bool
    flat: bool
    burst: float | None
    flushed: float | None
    flushed_known: tuple[Shape, float] | None
    reference_shape: Shape
    reference_share: float
    others: tuple[Figure, ...]
    also: tuple[Figure, ...]
    tried: int
    failed: Mapping[str, str]
    steady: Mapping[str, Any]
    load: Mapping[str, Any]
    seconds: float
    ended: str
    path: str
    peak: float | None
    known: tuple[Known, ...]
    model: Report | None = None

    @property
    def ok(self) -> bool:
        """Whether the run came to its end and the card was not held back by heat or its supply."""
        return not self.ended and not self.trouble

    @property
    def share_of_peak(self) -> float | None:
        """`sustained` as a share of the theoretical peak of the dtype."""
        return self.sustained / self.peak if self.peak else None

    @property
    def trouble(self) -> tuple[str, ...]:
        """The reasons for a low clock that are no part of a healthy card, in more than 5% of the looks."""
        return tuple(name for name in TROUBLE if self.load.get("throttle", {}).get(name, 0) > 0.05)

    def to_dict(self) -> dict[str, Any]:
        model = self.model.to_dict() if self.model is not None else None
        own = {"share_of_peak": self.share_of_peak, "trouble": list(self.trouble), "model": model}
        return {**super().to_dict(), **own}

    def text(self, color: bool = False, width: int = 80) -> str:
        rows = [*self._answer(), *self._why(), *self._runners(), *self._end()]
        lines = []
        for name, value in rows:
            lines.append(_filled(f"{name:<13}{value}", width) if name else value)
        text = "\n".join(lines)
        text = paint(text) if color else text
        return f"{text}\n\n{self.model.text(color, width)}" if self.model is not None else text

    def _answer(self) -> list[tuple[str, str]]:
        of_peak = f", {100 * self.share_of_peak:.1f}% of the {self.peak:g} peak" if self.share_of_peak else ""
        about = "" if self.settled else "about "
        rows = [
            ("MAMF", f"{about}{_rate(self.sustained)} TFLOPS sustained at {shape_text(self.shape)} (MxNxK){of_peak}"),
            ("on", f"{self.device}, {self._dtype()}, torch {self.torch}"),
        ]
        if self.settled:
            rows.append(("spread", f"{100 * self.spread:.2f}% from block to block, all back to back"))
        if self.burst:
            rows.append(("burst", f"{_rate(self.burst)} TFLOPS in the first 5 ms after idling"))
        if self.flushed:
            rows.append(("flushed", f"{_rate(self.flushed)} TFLOPS by the classic way, with pauses for cache flushes"))
        if self.flushed_known is not None:
            shape, rate = self.flushed_known
            rows.append(("", f"{'':13}{_rate(rate)} at {shape_text(shape)}, where others measured that way"))
        return rows

    def _why(self) -> list[tuple[str, str]]:
        rows = []
        for one in self.known:
            about = "about " if one.approximate else ""
            at = f" at {shape_text(one.shape)}" if one.shape else ""
            rows.append(("reference", f"{about}{one.tflops:g} TFLOPS {one.method}{at} ({one.source})"))
        if self.steady:
            rows.append(("clocks", _clocks(self.steady)))
        reasons = self.load.get("throttle", {})
        if reasons:
            rows.append(("held back by", ", ".join(f"{name} {100 * share:.0f}%" for name, share in reasons.items())))
        return rows

    def _runners(self) -> list[tuple[str, str]]:
        shown = self.others[: 10 if self.mode == "shapes" else 4]
        equal, others = (
            ", ".join(f"{shape_text(one.shape)} {_rate(one.tflops)}" for one in shown if one.equal == which)
            for which in (True, False)
        )
        return [(name, text) for name, text in (("as fast", equal), ("others", others)) if text]

    def _end(self) -> list[tuple[str, str]]:
        rows = [("run", f"{self.tried} shapes in {self.seconds:.1f} s, seed {self.seed}, every block in {self.path}")]
        if self.failed:
            shape, why = next(iter(self.failed.items()))
            rows.append(("left out", f"{len(self.failed)} shapes, such as {shape}: {why}"))
        if self.trouble:
            rows.append(("trouble", f"the card is held back by {', '.join(self.trouble)}: `mldebug doctor` looks why"))
        if self.settled and (self.spread > _NOISY or not self.flat):
            if self.load.get("throttle", {}).get("power limit", 0) > 0.5:
                why = "the power limit moves the clock up and down: more --seconds give a steadier figure"
            else:
                why = "the rate was not steady: run again with nothing else on the device, or longer"
            rows.append(("note", why))
        file = shlex.quote(str(self.path))
        if self.ended:
            rows.append(("ended early", f"by {self.ended}: the best so far; `--resume {file}` goes on"))
        elif self.settled and self.model is None and self.device_kind != "cpu":
            rows.append(("next", f"`mldebug mfu --mamf {file} ...` compares a training run with this"))
        return rows

    def _dtype(self) -> str:
        if not self.dtype.startswith(("float8", "mxfp8", "nvfp4")):
            return self.dtype
        fast = f", fast accumulation {'on' if self.fast_accum else 'off'}" if self.dtype.startswith("float8") else ""
        return f"{self.dtype} (one scale for each {self.scaling}{fast})"


def make_report(start: Mapping[str, Any], figures: Mapping[str, Any]) -> MamfReport:
    """The report of a run, with what is known of this kind of device from elsewhere."""
    device, dtype = start["device"], start["dtype"]
    known: dict[str, Known] = {}
    for one in mamf_references(device, dtype):
        if one.method in ("flushed", "sustained"):
            known.setdefault(
                one.method, Known(one.method, one.tflops, one.shape, one.approximate, one.source.split(" (")[0])
            )
    return MamfReport(**start, **figures, peak=theoretical_tflops(device, dtype), known=tuple(known.values()))


def _filled(text: str, width: int) -> str:
    """In lines of that width. Names of files stay whole, so that they can be copied."""
    return textwrap.fill(text, width, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False)


def _rate(tflops: float) -> str:
    """One digit behind the point, as people compare cards by; four digits for what is slower than that."""
    return f"{tflops:.1f}" if tflops >= 100 else f"{tflops:.4g}"


def _clocks(told: Mapping[str, Any]) -> str:
    parts = []
    if "sm_mhz" in told:
        most = f" of {told['sm_mhz_max']}" if "sm_mhz_max" in told else ""
        parts.append(f"SM {told['sm_mhz']:.0f}{most} MHz")
    if "memory_mhz" in told:
        parts.append(f"memory {told['memory_mhz']:.0f} MHz")
    if "watts" in told:
        limit = f" of {told['watts_limit']:.0f}" if "watts_limit" in told else ""
        parts.append(f"{told['watts']:.0f}{limit} W")
    if "celsius" in told:
        parts.append(f"{told['celsius']:.0f} °C")
    return ", ".join(parts)
