"""`mldebug trace-tail DIR`: what the traces of all ranks say together."""

from __future__ import annotations

import argparse
import os

from mldebug.cli._parser import Parser, add_common, count, file_to_write
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
examples:
  mldebug trace-tail /scratch/traces
  mldebug trace-tail /scratch/traces --lines 10 --pattern 'all_reduce|barrier'
  mldebug trace-tail traces/trace-node1-*.txt --no-compare

Reads what `mldebug trace` wrote for all ranks of a job, rotated, compressed and
ring files too: which rank stopped first, the first line after which ranks went
different ways and in which iteration, the last lines of all ranks, and counts
of a pattern. Iterations are counted from 0. The job may still run. Exit status
1 if a rank is missing, stopped early or went another way."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("paths", nargs="+", metavar="DIR", help="the folder with the traces, or some of its files")
    parser.add_argument("--lines", type=count, default=3, metavar="N", help="last lines of each rank (default: 3)")
    parser.add_argument("--pattern", metavar="REGEX", help="count the lines that match, for each rank")
    parser.add_argument(
        "--no-compare",
        action="store_true",
        help="read only the ends of the files, and do not look where ranks went different ways",
    )
    parser.add_argument("--jobs", type=count, metavar="N", help="processes that read (default: the CPUs, at most 8)")
    add_common(parser, output="write the report to FILE as JSON")


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    from mldebug.tracing._tail import trace_tail

    processes = args.jobs or min(8, len(os.sched_getaffinity(0)))
    where = args.paths[0] if len(args.paths) == 1 else args.paths
    report = trace_tail(where, lines=args.lines, pattern=args.pattern, compare=not args.no_compare, processes=processes)
    emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
    if report.interrupted:
        return 130
    return 0 if report.ok else 1
