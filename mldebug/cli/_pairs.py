"""`mldebug pairs`: which GPU, node or path of a cluster is bad."""

from __future__ import annotations

import argparse

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
examples:
  mldebug pairs --from pairs.csv
  mldebug pairs --from pairs.csv --json
  mldebug pairs --from rack1.csv --from rack2.csv -o pairs.png

FILE is CSV with the header src,dst,gbps,status (and, if known, latency_us and
round), or JSON. src and dst are host:gpu; gbps is in 10^9 bytes/s; status is
ok, hang, error, wrong (contents), dead, missing or skipped. A pair may be there
many times, and missing pairs are no trouble. Each pair is judged beside its
siblings, and by no bandwidth known beforehand. Exit status 1 if a GPU, a node,
the routes between rails or a path is bad."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--from", dest="sources", action="append", required=True, metavar="FILE", help=_FROM)
    add_common(parser, output="write the matrix to FILE (.csv, .json, or .png for a heat map)")


_FROM = "judge the matrix in FILE; repeatable, the files are one matrix"


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    from mldebug.cluster import pair_matrix

    report = pair_matrix(args.sources)
    if output is not None:
        report.save(output)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return 0 if report.ok else 1
