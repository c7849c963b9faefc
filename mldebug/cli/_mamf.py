"""`mldebug mamf`: how many TFLOPS matrix products reach on this device, and at which shape."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from mldebug.cli._parser import Parser, add_common, count, file_to_write, seconds, whole
from mldebug.core.errors import UsageError
from mldebug.core.launch import ends_on_sigterm
from mldebug.core.report import emit, write
from mldebug.core.world import world

PARSER = Parser
EPILOG = """\
examples:
  mldebug mamf
  mldebug mamf --dtype fp8 --scaling row --seconds 120
  mldebug mamf --shape 8192x8192x8192 --shape 4096x14336x4096
  mldebug mamf --model llama-7b --seq 4096
  mldebug mamf --all-gpus
  torchrun --nnodes 4 --nproc-per-node 8 ... -m mldebug mamf
  mldebug mamf --exhaustive --m-range 1024 16384 1024 --n 4096 --k 4096
  mldebug mamf --resume mamf-node1-cuda0-20260101-120000-77.jsonl

Sustained is what a shape holds back to back at the clock that power and
temperature leave it; burst is the first 5 ms after idling. Every measured block
goes to a file of JSON lines at once; Ctrl-C and SIGTERM end the run with the
best so far (status 130 and 143)."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--dtype", default="bfloat16", metavar="T", help="bf16 (default), fp16, fp32, tf32, fp8, int8, mxfp8, nvfp4")
    add("--scaling", choices=("tensor", "row"), default="tensor", help="of fp8: a scale for all, or one for each row")
    add("--no-fast-accum", action="store_true", help="fp8: add up in full precision")
    add("--device", default="auto", metavar="KIND", help="cuda, rocm, xpu, mps or cpu (default: the best here)")
    add("--index", type=whole, metavar="I", help="which of the visible devices (default: the current one)")
    add("--seconds", type=seconds, metavar="S", help="time for the whole run (default: below a minute; 10 on a CPU)")
    add("--shape", type=shape, action="append", default=[], metavar="MxNxK", help="measure this one only; repeatable")
    add("--try", dest="extra", type=shape, action="append", default=[], metavar="MxNxK", help="search from here too")
    add("--all-gpus", action="store_true", help="all devices of this node at once, and which of them is behind")
    add("--model", metavar="M", help="the shapes of a model too: a config.json, folder or name, such as llama-7b")
    add("--seq", type=count, default=0, metavar="N", help="tokens in a sequence of --model (default: its longest)")
    add("--batch", type=count, default=1, metavar="N", help="sequences in a batch of --model (1)")
    add("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks that --model is cut for (1)")
    add("--exhaustive", action="store_true", help="measure all shapes of the sizes or ranges below, in any time")
    for size in "mnk":
        add(f"--{size}", type=count, nargs="+", metavar=size.upper(), help=f"sizes of {size} for --exhaustive")
        add(
            f"--{size}-range", type=whole, nargs=3, metavar=("START", "STOP", "STEP"),
            help=f"the same as a range: STOP is left out, as is {size} = 0",
        )  # fmt: skip
    add("--seed", type=whole, metavar="N", help="of the random choices, to repeat a run (default: another each time)")
    add("--resume", metavar="FILE", help="go on where this result file ends")
    add_common(parser, output="write the measured blocks to FILE (default: a new one here)")


def run(args: argparse.Namespace) -> int:
    from mldebug.perf import mamf

    if args.resume and args.output:
        raise UsageError("--resume writes on in its own file, so -o has no meaning", "leave one of them out")
    output = file_to_write("--output", args.output)
    shapes = _shapes(args)
    _of_fp8(args)
    if args.all_gpus or world().world_size > 1:
        return _all_gpus(args, shapes, output)
    model, also = _model(args)
    progress = Progress(args.quiet)
    report = mamf(
        args.dtype, device=args.device, index=args.index, seconds=args.seconds, shapes=shapes, extra=args.extra,
        exhaustive=args.exhaustive, scaling=args.scaling, fast_accum=not args.no_fast_accum, seed=args.seed,
        also=also, output=output, resume=args.resume, progress=progress,
    )  # fmt: skip
    progress.clear()
    if model is not None:
        from mldebug.perf.matmul._model_report import model_report
        from mldebug.perf.matmul._swiglu import swiglu_of

        swiglu, ended = _ended_by_rule(
            lambda measure: swiglu_of(model, dtype=report.dtype, measure=measure), report.ended
        )
        rates: Any = {one.shape: one.tflops for one in report.also}
        told = model_report(
            model, rates, dtype=report.dtype, device_name=report.device, mamf=report.sustained, swiglu=swiglu
        )
        report = dataclasses.replace(report, model=told, ended=ended)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return {"SIGINT": 130, "SIGTERM": 143}.get(report.ended, 0 if report.ok else 1)


def _all_gpus(args: argparse.Namespace, shapes: list[tuple[int, int, int]], output: str | None) -> int:
    from mldebug.perf import mamf_all_gpus

    alone = {"--resume": args.resume, "--model": args.model, "--index": args.index is not None, "--try": args.extra}
    for option, given in {**alone, "--exhaustive": args.exhaustive}.items():
        if given:
            raise UsageError(f"{option} is for one device, and this measures all", "leave one of them out")
    progress = Progress(args.quiet or world().rank > 0)
    report = mamf_all_gpus(
        args.dtype, seconds=args.seconds, shapes=shapes, scaling=args.scaling, fast_accum=not args.no_fast_accum,
        device=args.device, output=output, seed=args.seed, progress=progress,
    )  # fmt: skip
    progress.clear()
    if report is None:
        return 0  # rank 0 speaks for all
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return {"SIGINT": 130, "SIGTERM": 143}.get(report.ended, 0 if report.ok else 1)


class Progress:
    """One line on stderr that is written over and over, where that is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._shown = 0.0
        self._terminal = not quiet and sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal and now - self._shown > 0.2:
            self._shown = now
            write(f"\r\033[K{text[:78]}", sys.stderr)

    def clear(self) -> None:
        if self._shown:
            write("\r\033[K", sys.stderr)


def shape(text: str) -> tuple[int, int, int]:
    """`8192x4096x1024`."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if match is None or min(map(int, match.groups())) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK, such as 8192x4096x1024")
    return int(match[1]), int(match[2]), int(match[3])


def _ended_by_rule(look: Callable[[bool | None], Any], ended: str) -> tuple[Any, str]:
    """What `look` finds by measuring, and by rule once the run was ended; and what ended it. The report is not lost."""
    if not ended:
        try:
            with ends_on_sigterm():
                return look(None), ""
        except KeyboardInterrupt:
            ended = "SIGINT"
        except SystemExit:
            ended = "SIGTERM"
    return look(False), ended


def _of_fp8(args: argparse.Namespace) -> None:
    """Options that mean nothing for the dtype are refused: who gives them measures something else than he thinks."""
    from mldebug.perf.matmul._peaks import canonical_dtype

    if canonical_dtype(args.dtype).startswith("float8"):
        return
    for option, given in {"--scaling row": args.scaling == "row", "--no-fast-accum": args.no_fast_accum}.items():
        if given:
            raise UsageError(
                f"{option} is for fp8, and this multiplies {args.dtype}", "add --dtype fp8, or leave it out"
            )


def _model(args: argparse.Namespace) -> tuple[Any, list[tuple[int, ...]]]:
    """The model that was asked for, and the shapes that it is to be measured by."""
    if args.model is None:
        if args.seq or args.batch > 1 or args.tp > 1:
            raise UsageError("--seq, --batch and --tp are for --model", "name the model, such as --model llama-7b")
        return None, []
    from mldebug.perf.matmul._model import model_shapes
    from mldebug.perf.matmul._model_report import to_measure

    model = model_shapes(args.model, seq=args.seq, batch=args.batch, tp=args.tp)
    return model, list(to_measure(model))


def _shapes(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Those that were asked for by --shape, or all of the ranges."""
    given = [getattr(args, size) or getattr(args, f"{size}_range") for size in "mnk"]
    if not args.exhaustive:
        if any(given):
            raise UsageError("sizes and ranges are for --exhaustive", "add --exhaustive, or use --shape MxNxK")
        return list(args.shape)
    sizes = []
    for size in "mnk":
        many, bounds = getattr(args, size), getattr(args, f"{size}_range")
        if (many is None) == (bounds is None):
            raise UsageError(
                f"--exhaustive needs --{size} or --{size}-range, one of them",
                "for example: --m-range 1024 16384 1024 --n 4096 --k 4096",
            )
        sizes.append(many or [one for one in range(*_checked(size, bounds)) if one])
    return [*args.shape, *((m, n, k) for m, n, k in itertools.product(*sizes))]


def _checked(size: str, bounds: list[int]) -> list[int]:
    start, stop, step = bounds
    if step < 1 or not range(max(start, 1), stop):
        raise UsageError(f"--{size}-range {start} {stop} {step} is empty", "START STOP STEP, START below STOP")
    return bounds
