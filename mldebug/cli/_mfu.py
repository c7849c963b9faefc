"""`mldebug mfu`: the share of what the GPUs can do that a training run reaches, from its tokens per second."""

from __future__ import annotations

import argparse
import math
import shlex
import sys

from mldebug.cli._parser import Parser, add_common, count, file_to_write
from mldebug.core.report import emit, write

PARSER = Parser
EPILOG = """\
examples:
  mldebug mfu --tokens-per-second 25600 --model llama2-7b --gpus 8
  mldebug mfu --tokens-per-second 1.2e6 --model config.json --seq 8192 \\
      --gpus 256 --device "NVIDIA H100 80GB HBM3" --recompute full
  mldebug mamf -o mamf.json; mldebug mfu ... --mamf mamf.json

MFU is the share of the theoretical peak, MAMFU that of what matrix products
reach at best. Tokens per second are those of all GPUs together. MODEL is a
config.json, a folder, a short name such as llama3-8b, a repository that is in
the hub's cache, or a model type; nothing is downloaded. Exit status 1 for more
than the GPUs can do."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--tokens-per-second", type=_above_zero, required=True, metavar="N", help="of all GPUs together")
    add("--model", required=True, metavar="MODEL", help="config.json, folder, short name, cached repository, type")
    add("--gpus", type=count, default=1, metavar="N", help="GPUs of the job (1)")
    add("--seq", type=count, default=0, metavar="N", help="tokens of a sequence (default: the config's, at most 4096)")
    add("--device", default="", metavar="NAME", help="the GPU, as nvidia-smi names it (default: the one here)")
    add("--dtype", default="bfloat16", help="what the matrix products compute in (bfloat16)")
    add(
        "--attention",
        choices=("full", "causal"),
        default="full",
        help="count all pairs of positions, or those under the mask (full)",
    )
    add(
        "--recompute",
        choices=("none", "attention", "full"),
        default="none",
        help="what checkpointing computes again: counts for HFU (none)",
    )
    add("--peak", type=_above_zero, metavar="TFLOPS", help="theoretical peak of a GPU, instead of the table's")
    add("--mamf", metavar="X", help="measured ceiling in TFLOPS, or a file of `mldebug mamf -o`")
    add_common(parser, output="write the report to FILE")


def run(args: argparse.Namespace) -> int:
    from mldebug.perf.matmul._mfu import mfu

    output = file_to_write("--output", args.output)
    report = mfu(
        args.tokens_per_second,
        args.model,
        gpus=args.gpus,
        device=args.device,
        dtype=args.dtype,
        seq=args.seq,
        attention=args.attention,
        recompute=args.recompute,
        peak=args.peak,
        mamf=_number_or_file(args.mamf),
    )
    emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
    if report.peak is None and not (args.device or args.json or args.quiet) and getattr(args, "own_process", False):
        write(f"for example: {shlex.join(['mldebug', *sys.argv[1:], '--device', 'H100'])}\n", sys.stderr)
    return 0 if report.ok else 1


def _above_zero(text: str) -> float:
    value = _float(text)
    if value is None or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _number_or_file(text: str | None) -> float | str | None:
    value = _float(text) if text else None
    return text if value is None else value


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
