"""The classic finder: each shape of some ranges in turn, a flush of the cache before each call, and the best mean."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mldebug.core.device import Device, find_device
from mldebug.core.errors import UsageError
from mldebug.core.launch import ends_on_sigterm
from mldebug.perf.matmul._blocks import Shape, flops_of, shape_text

_KINDS = ("mean", "median", "max")


@dataclass
class ClassicResult:
    """The best TFLOPS and its shape by mean, median and max, and the mean of every shape that was measured."""

    best: dict[str, tuple[float, Shape | None]] = field(default_factory=lambda: {kind: (0.0, None) for kind in _KINDS})
    means: list[float] = field(default_factory=list)
    failed: dict[Shape, str] = field(default_factory=dict)
    ended: str = ""


def classic_search(
    sizes: Sequence[Sequence[int]],
    *,
    dtype: str = "bfloat16",
    device: Device | None = None,
    iterations: int = 100,
    warmup: int = 50,
    output: str | os.PathLike[str],
    verbose: bool = True,
    notes: str = "",
    ranges: str = "",
    heat: float = 30.0,
) -> ClassicResult:
    """Measure every m, n, k of `sizes` as classic finders do, and write their tables to `output` and to stdout.

    `heat` seconds of the first shape come before. Each figure is of calls with pauses for flushes in between, where a
    card clocks higher than under load: see `mamf()` for what can be held. A shape that fails is left out and told.
    Ctrl-C and SIGTERM end it with the best so far.

        classic_search([[2048], [2048], [8192, 13312]], output="mm.txt")
    """
    from mldebug.perf.matmul._formats import find_format
    from mldebug.perf.matmul._machine import TorchMachine, first_rate, may_fit
    from mldebug.perf.matmul._ways import FLUSH_BYTES, flushed

    device = device or find_device()
    device.set_current()
    form = find_format(device, dtype)
    shapes: list[Shape] = [(m, n, k) for m, n, k in itertools.product(*sizes)]
    if iterations < 1 or warmup < 0:
        raise UsageError(f"{iterations} iterations after {warmup} for warming up", "give 1 or more, after 0 or more")
    if not shapes:
        raise UsageError("there is no shape in these ranges", "a range is START STOP STEP, and STOP is left out")
    flush = FLUSH_BYTES if device.kind != "cpu" else 32 << 20
    result, began = ClassicResult(), time.monotonic()
    with _Tee(output, verbose) as out:
        _header(out, form.dtype, device, notes)
        with _ended_by_signal(result):
            likely = [shape for shape in shapes if may_fit(form, shape)] or [(64, 64, 64)]
            with TorchMachine(form, shapes=likely, tflops=first_rate(form), seed=0) as machine:
                out.write(f"Warming up the accelerator for {heat:g} secs ... ")
                until = time.monotonic() + heat
                while time.monotonic() < until and machine.fits(shapes[0]):
                    flushed(machine, shapes[0], 10, 0, flush)
                out.write("accelerator warmup finished\n")
                began = time.monotonic()
                for shape in shapes:
                    try:
                        seconds = flushed(machine, shape, iterations, warmup, flush)
                    except (RuntimeError, MemoryError) as exc:
                        result.failed[shape] = machine.failure(exc)
                        out.write(f"\r\033[Kleft out: {shape_text(shape)}: {result.failed[shape]}\n")
                        continue
                    out.write(_row(result, shape, seconds))
        _footer(out, result, ranges, time.monotonic() - began)
    return result


def _row(result: ClassicResult, shape: Shape, seconds: Sequence[float]) -> str:
    times = {"mean": statistics.fmean(seconds), "median": statistics.median(seconds), "max": min(seconds)}
    rates = {kind: flops_of(shape) / times[kind] / 1e12 for kind in _KINDS}
    result.means.append(rates["mean"])
    for kind, rate in rates.items():
        if rate > result.best[kind][0]:
            result.best[kind] = (rate, shape)
    now, best = (
        " ".join(f"{one:6.1f}({kind})" for kind, one in told.items())
        for told in (rates, {kind: result.best[kind][0] for kind in _KINDS})
    )
    return f"{len(result.means):>6} | {now} @ {shape_text(shape):<20} | best: {best} TFLOPS\r"


def _header(out: _Tee, dtype: str, device: Device, notes: str) -> None:
    import torch

    cuda = f"cuda={torch.version.cuda}" if device.kind == "cuda" else f"hip={torch.version.hip}"
    out.write(f"""
Benchmark started on {time.strftime("%Y-%m-%d %H:%M:%S")}

** Command line:
{sys.executable} {shlex.join(sys.argv)}

** Dtype: {dtype}

** Platform/Device info:
- {" ".join(platform.uname())}
- {device.name}

** Critical software versions:
- torch={torch.__version__}
- {cuda if device.kind in ("cuda", "rocm") else device.kind}

** Critical environment variables:
- PYTORCH_TUNABLEOP_ENABLED={os.environ.get("PYTORCH_TUNABLEOP_ENABLED", "0")}

** Additional notes:
- measured by mldebug, with a flush of the cache before each call
{notes}

{"-" * 80}

""")


def _footer(out: _Tee, result: ClassicResult, ranges: str, seconds: float) -> None:
    count = len(result.means)
    if not count:
        out.write("\r\033[K\nNo shape was measured\n")
        return
    rows = [
        f"{kind + ':':<8}{rate:.1f} TFLOPS @ {shape_text(shape or ())} (MxNxK)"
        for kind, (rate, shape) in result.best.items()
    ]
    geometric = math.exp(statistics.fmean(math.log(one) for one in result.means))
    table = "\n".join(rows)
    out.write(f"""\r\033[K
Tried {count} shapes => the best outcomes were:
{table}

Across {count} shapes in range: {ranges} in this run:
arithmetic mean: {statistics.fmean(result.means):.1f} TFLOPS
geometric mean:  {geometric:.1f} TFLOPS

Legend: TFLOPS = 10**12 FLOPS
Elapsed time: {int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}
""")


@contextlib.contextmanager
def _ended_by_signal(result: ClassicResult) -> Iterator[None]:
    try:
        with ends_on_sigterm():
            yield
    except KeyboardInterrupt:
        result.ended = "SIGINT"
    except SystemExit as exc:
        result.ended = "SIGTERM" if exc.code == 143 else f"exit {exc.code}"


class _Tee:
    """Writes to a file, and to stdout if `verbose`. A line that a terminal writes over is kept in the file."""

    def __init__(self, path: str | os.PathLike[str], verbose: bool) -> None:
        where = Path(path)
        try:
            where.resolve().parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = where.open("w", encoding="utf-8")
        except OSError as exc:
            raise UsageError(
                f"cannot write {path}: {(exc.strerror or str(exc)).lower()}", "name another with --output_file"
            ) from exc
        self._verbose = verbose

    def __enter__(self) -> _Tee:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, text: str) -> None:
        if self._verbose:
            sys.stdout.write(text)
            sys.stdout.flush()
        with contextlib.suppress(OSError):  # a full disk is no reason to measure no more
            self._file.write(text.replace("\033[K", "").replace("\r", "\n"))
            self._file.flush()
