"""`mldebug allreduce`: busbw of all_reduce over all GPUs, without any option."""

from __future__ import annotations

import argparse

from mldebug.cli import _comms
from mldebug.cli._parser import Parser, file_or_picture_to_write

PARSER = Parser
EPILOG = """\
examples:
  mldebug allreduce
  mldebug allreduce -e 1G --min-busbw 400
  mldebug allreduce --hosts node[01-04]
  srun --ntasks-per-node 8 mldebug allreduce -o allreduce.json

32 KiB to 16 GiB of float32, in place as in training, contents checked; below
16 MiB by replaying a CUDA graph. `mldebug comms` has all other collectives,
dtypes and ways to time. Exit status 1 if contents are wrong, a rank hangs or
dies, or busbw is below --min-busbw."""


def add_arguments(parser: Parser) -> None:
    _comms.add_sizes(parser)
    _comms.add_start(parser)
    parser.set_defaults(
        collectives=[], stepbytes=0, datatype="float", op="sum", root=0, check=1, blocking=False, cudagraph=None,
        in_place=True, profile_stability=0, objects=0,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    return _comms.measure(args, _comms.options_of(args, file_or_picture_to_write("--output", args.output) or ""))
