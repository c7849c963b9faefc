"""`mldebug spy`: which rank of a hung job holds the others up, and why."""

from __future__ import annotations

import argparse
from typing import Any

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
examples:
  mldebug spy
  mldebug spy --name train.py --native
  mldebug spy -o now.json; sleep 60; mldebug spy --diff now.json
  mldebug spy --from node1.json --from node2.json --json
  mldebug spy -o job.speedscope.json

Finds the ranks of this node by itself and looks at each of them twice, without
stopping them. The job needs no edit. Exit status 1 if the job hangs, 0 if it is
slow or fine. A FILE that ends in .folded or .speedscope.json gets the stacks
for such viewers."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--pid", action="append", type=_count, default=[], help="look at this process; repeatable")
    parser.add_argument("--name", metavar="TEXT", help="look at processes whose command line has TEXT")
    parser.add_argument("--user", metavar="USER", help="look at processes of USER only")
    parser.add_argument("--from", dest="sources", action="append", default=[], metavar="FILE", help=_FROM)
    parser.add_argument("--diff", metavar="FILE", help="say who moved since this earlier evidence")
    parser.add_argument("--samples", type=_count, metavar="N", help="looks at each process (default: 2)")
    parser.add_argument("--interval", type=_seconds, metavar="S", help="seconds between two looks")
    parser.add_argument("--native", action="store_true", help="stacks of C and C++ too; pauses the processes")
    parser.add_argument("--locals", action="store_true", help="keep all local variables; they may hold private data")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="give up on a process after S seconds")
    add_common(parser, output="write the evidence to FILE, for --from and --diff")


_FROM = "judge evidence from FILE and look at nothing; repeatable, one for each node"


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    chosen = _chosen(args)
    if args.sources and chosen:
        raise UsageError(
            f"--from looks at no process, so --{next(iter(chosen))} has no meaning", "leave one of them out"
        )
    from mldebug.hang import load_evidence, save_evidence, spy

    earlier = load_evidence([args.diff]) if args.diff else None
    evidence = load_evidence(args.sources) if args.sources else None
    report = spy(evidence, earlier=earlier, **chosen)
    if output is not None:
        save_evidence(report.evidence, output)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return 0 if report.ok else 1


def _chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The options of collect() that were given."""
    given = {
        "pids": tuple(args.pid),
        "name": args.name,
        "user": args.user,
        "samples": args.samples,
        "interval": args.interval,
        "native": args.native,
        "locals": args.locals,
        "timeout": args.timeout,
    }
    return {key: value for key, value in given.items() if value not in (None, False, ())}


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
