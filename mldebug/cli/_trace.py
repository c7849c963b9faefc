"""`mldebug trace -- train.py`: run a script and write each line of it before it runs."""

from __future__ import annotations

import argparse
import atexit
import re
from contextlib import nullcontext
from dataclasses import dataclass

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, size
from mldebug.cli._script import run_to_its_end, script_of
from mldebug.cli._streams import StdoutToStderr
from mldebug.core.report import Report, emit, tell

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug trace -- train.py --lr 1e-3
  mldebug trace --ring 64MB -o /scratch/traces -- -m project.train
  mldebug trace --include user --include torch.distributed -- train.py
  torchrun --nproc-per-node 8 -m mldebug trace --ring 64MB -- train.py

G is a module or package, a path, module:function, a glob of these, or one of
the words user (the default), installed, stdlib and all. Each process writes
trace-{host}-{rank}-{pid}.txt; `mldebug trace-tail FOLDER` reads them. The
script's output and exit status are its own. A signal, SIGRTMIN+7 unless
--signal names another, pauses the trace and lets it go on."""

_SIGNAL = "SIGRTMIN+7"


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--include",
        action="append",
        default=[],
        metavar="G",
        help="trace what matches, and not user code; repeatable",
    )
    add("--exclude", action="append", default=[], metavar="G", help="leave out what matches; repeatable")
    add("--depth", type=count, metavar="N", help="show traced calls down to this depth, from 1")
    add("--calls-only", action="store_true", help="write calls and no lines")
    add("--returns", action="store_true", help="write what functions return")
    add("--exceptions", action="store_true", help="write exceptions where they pass")
    add("--args", action="store_true", help="write the arguments of calls, in a few words each")
    add("--threads", action="store_true", help="write the name of the thread in each line")
    add("--start-at", metavar="M:F", help="begin when this function is called: module:function")
    add("--after", type=_duration, metavar="TIME", help="begin after this time: 90s, 30m, 2h")
    add(
        "--signal",
        default=_SIGNAL,
        metavar="NAME",
        help=f"pause and go on at it, or none (default: {_SIGNAL})",
    )
    add("--ring", type=size, metavar="SIZE", help="keep the newest lines in a file of this size, at less cost: 64MB")
    add("--rotate", type=size, metavar="SIZE", help="begin another file at this size, and keep the last ten")
    add("--compress", action="store_true", help="compress the files that --rotate has finished")
    add_common(parser, output="write the traces to FOLDER (default: the current one)", metavar="FOLDER")


@dataclass(frozen=True)
class TraceReport(Report):
    """Where the trace of this process is, and the script's exit status."""

    path: str
    status: int

    @property
    def ok(self) -> bool:
        return self.status == 0


def run(args: argparse.Namespace) -> int:
    target, module = script_of(args.script, "trace")
    from mldebug.tracing import NicerTrace

    tracer = NicerTrace(
        count=False,
        include=args.include or None,
        exclude=args.exclude,
        depth=args.depth,
        calls_only=args.calls_only,
        returns=args.returns,
        exceptions=args.exceptions,
        args=args.args,
        threads=args.threads,
        start_at=args.start_at,
        after=args.after,
        signal=None if args.signal.lower() == "none" else args.signal,
        ring=args.ring,
        rotate=args.rotate,
        compress=args.compress,
        output=args.output or ".",
    )
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        status = 0
        if args.own_process:  # the script's own exit handlers come before, and are traced
            atexit.register(lambda: tracer.end_of_program(interrupted=status == 130))
        tracer.start()
        if not args.quiet and tracer.path:
            tell(f"mldebug: the trace is in {tracer.path}\n")
        try:
            status = run_to_its_end(target, module)
        finally:
            if not args.own_process:
                tracer.stop(None)
        if streams is not None:
            emit(TraceReport(tracer.path, status), json=True, stream=streams.stdout)
    return status


def _duration(text: str) -> float:
    """90, 90s, 30m, 2h, 1d: seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
