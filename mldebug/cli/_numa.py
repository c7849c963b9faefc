"""`mldebug numa`: bind a rank to the CPUs near its GPU, or show which those are."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import nullcontext

from mldebug.cli._parser import Parser, ScriptParser, add_common, file_to_write, whole
from mldebug.cli._script import run_to_its_end, script_of
from mldebug.cli._streams import StdoutToStderr, emit_beside
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug numa
  mldebug numa --split
  torchrun --nproc-per-node 8 -m mldebug numa -- train.py --lr 1e-3
  srun mldebug numa --split --memory prefer -- -m project.train
  mldebug numa --device 2 --no-python -- ./server --port 80

Without a script: the table of all GPUs and the --cpu-bind masks for srun. With
one: this process is bound, then runs it; its children, such as DataLoader
workers, inherit that. Where nothing near may be used, all stays as it was, and
stderr says why. The script's output and exit status are its own."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--device", type=whole, metavar="N", help="the GPU, as torch counts (default: the local rank)")
    parser.add_argument(
        "--split", action="store_true", help="ranks that share CPUs get a part each, whole cores, no overlap"
    )
    parser.add_argument(
        "--memory", choices=("prefer", "bind"), help="take memory from the GPU's node first, or only from there"
    )
    parser.add_argument("--no-python", action="store_true", help="what follows is a program, not a Python script")
    add_common(parser, output="write the report to FILE as JSON")


def run(args: argparse.Namespace) -> int:
    from mldebug.perf.numa._bind import bind_numa, numa_table

    output = file_to_write("--output", args.output)
    if not args.script:
        if args.device is not None or args.memory or args.no_python:
            raise UsageError("no script to run: the table binds nothing", "mldebug numa [options] -- train.py")
        report = numa_table(split=args.split)
        emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
        return 0 if report.ok else 1
    program = args.script[1:] if args.script[:1] == ["--"] else args.script
    target, module = (_found(program), False) if args.no_python else script_of(args.script, "numa")
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        bound = bind_numa(args.device, split=args.split, memory=args.memory, quiet=True)
        emit_beside(bound, args, streams, output=output)
        if args.no_python:
            _become(target)
        return run_to_its_end(target, module)


def _found(program: list[str]) -> list[str]:
    """The program, if there is one of this name: else it is said before anything is bound."""
    if not program:
        raise UsageError("no program to run", "mldebug numa --no-python -- PROGRAM ARGUMENTS")
    if not os.path.dirname(program[0]) and shutil.which(program[0]) is None:
        raise UsageError(f"cannot run {program[0]}: no such file or directory", "give its path, or put it on PATH")
    return program


def _become(program: list[str]) -> None:
    """Run it in the place of this process, so that signals and the exit status are its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execvp(program[0], program)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise UsageError(f"cannot run {program[0]}: {reason}", "give its path, or put it on PATH") from exc
