"""`mldebug compare A B`: where two recorded runs part; with --record, make a recording of a script."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

from mldebug.cli._parser import Parser, add_common, count, file_to_write
from mldebug.cli._script import run_to_its_end, script_of
from mldebug.cli._streams import StdoutToStderr, emit_beside
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

EPILOG = """\
examples:
  mldebug compare --record before -- train.py --steps 2
  mldebug compare --record after --forwards 2 -- train.py   (since the upgrade)
  mldebug compare before after
  torchrun --nproc-per-node 8 -m mldebug compare --record tp8 -- train.py

--record runs a script, which needs no edit, and writes what every module takes
and returns to a folder, one set of files for each rank; its exit status is
passed on. `mldebug compare A B` then names the first module whose inputs agree
and whose outputs do not, by more than rounding in their dtypes explains, and
says what else differs: weights, versions, devices, switches, random numbers.
Recordings of sharded runs are put together again. Exit status 1 if they part."""


class _CompareParser(Parser):
    """Two folders, or a script after `--`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        own, script = list(args), []
        if "--" in own:
            at = own.index("--")
            own, script = own[:at], own[at:]
        parsed = super().parse_args(own, namespace)
        parsed.script = script
        return parsed


PARSER = _CompareParser


def add_arguments(parser: Parser) -> None:
    parser.usage = f"{parser.prog} A B\n       {parser.prog} --record DIR [options] -- train.py [its arguments]"
    parser.add_argument("folders", nargs="*", metavar="A B", help="the folders of two recordings")
    parser.add_argument(
        "--tolerance", type=_number, metavar="X", help="error to allow, of a tensor's scale (default: by dtype)"
    )
    parser.add_argument("--record", metavar="DIR", help="run a script and record it to DIR")
    parser.add_argument("--ops", action="store_true", help="record the output of every operation too (slow)")
    parser.add_argument("--forwards", type=count, metavar="N", help="record only the first N forwards of the model")
    parser.add_argument("--max-mb", type=count, default=1024, metavar="N", help="size of a rank's recording (1024)")
    parser.add_argument("--full-mb", type=count, default=4, metavar="N", help="keep tensors up to this size whole (4)")
    add_common(parser, output="write the report to FILE as JSON")


def run(args: argparse.Namespace) -> int:
    if args.record is not None:
        return _record(args)
    if args.script or len(args.folders) != 2:
        raise UsageError(
            f"two recordings are compared, and {len(args.folders)} were given",
            "mldebug compare A B; mldebug compare --record A -- train.py makes one",
        )
    output = file_to_write("--output", args.output)
    from mldebug.numerics.runs._compare import compare

    report = compare(*args.folders, tolerance=args.tolerance)
    emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
    return 0 if report.ok else 1


def _record(args: argparse.Namespace) -> int:
    if args.folders:
        raise UsageError(f"--record takes no {args.folders[0]}", "the script goes after `--`")
    script, module = script_of(args.script, "compare --record DIR")
    if os.path.exists(args.record) and not os.path.isdir(args.record):
        raise UsageError(f"--record {args.record}: this is a file", "name a folder")
    output = file_to_write("--output", args.output)
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        from mldebug.numerics.runs._recording import record_run

        limits = {"max_bytes": args.max_mb << 20, "full_bytes": args.full_mb << 20}
        with record_run(args.record, ops=args.ops, forwards=args.forwards, **limits) as recording:
            status = run_to_its_end(script, module)
        report = recording.report
        emit_beside(report, args, streams, output=output)
    return status


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value
