"""`mldebug pairs`: which GPU, node or path of a cluster is bad."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mldebug.cli._missing import require
from mldebug.cli._parser import Parser, add_common, add_remote, count, file_or_picture_to_write, seconds, size
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import emit, tell

if TYPE_CHECKING:
    from mldebug.cluster.pairs._report import PairsReport

PARSER = Parser
EPILOG = """\
examples:
  mldebug pairs
  mldebug pairs --nproc 4 --backend gloo
  mldebug pairs --hosts node[01-16] -o pairs.json
  srun --ntasks-per-node 8 mldebug pairs --sample
  mldebug pairs --hosts a,b,c --nodes-only
  mldebug pairs --hosts node[01-64] --ping
  mldebug pairs --from pairs.csv
  mldebug pairs --from rack1.csv --from rack2.csv -o pairs.png

Under torchrun, srun or mpirun it is one of their ranks; by itself it starts a
worker for each GPU, here or on each of --hosts. Rounds of disjoint pairs run at
once; a pair that hangs or dies is replaced alone, and the rest go on. FILE is
CSV with the header src,dst,gbps,status (and, if known, latency_us and round),
or JSON. src and dst are host:gpu; gbps is in 10^9 bytes/s; status is ok, hang,
error, wrong (contents), dead, missing or skipped. A pair may be there many
times, and missing pairs are no trouble. Each pair is judged beside its
siblings, and by no bandwidth known beforehand. Exit status 1 if a GPU, a node,
the routes between rails or a path is bad."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--from", dest="sources", action="append", metavar="FILE", help=_FROM)
    parser.add_argument(
        "--nproc", type=count, metavar="N", help="workers to start on each host (default: its accelerators)"
    )
    parser.add_argument("--hosts", metavar="LIST", help="measure these hosts over ssh: node[001-016], a,b,c")
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "rccl", "gloo", "xccl"), default="auto",
        help="what carries the messages (default: auto, by the accelerator)",
    )  # fmt: skip
    parser.add_argument("--ping", action="store_true", help="TCP between hosts: no torch, no NCCL, no GPU")
    parser.add_argument("--nodes-only", action="store_true", help="nodes against nodes: busbw of all their GPUs")
    parser.add_argument("--sample", action="store_true", help="a dozen rounds, however many nodes there are")
    parser.add_argument("--bytes", type=size, default=0, metavar="N", help="size of a message: 64M (256M; CPUs 4M)")
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="S", help="a pair that takes longer hangs (30 seconds)"
    )
    parser.add_argument(
        "--start-timeout", type=seconds, default=180.0, metavar="S", help="the same for loading torch (180)"
    )
    add_remote(parser)
    add_common(parser, output="write the matrix to FILE (.csv, .json, or .png for a heat map)")


_FROM = "judge the matrix in FILE, and measure nothing; repeatable: one matrix"


def run(args: argparse.Namespace) -> int:
    output = file_or_picture_to_write("--output", args.output)
    if args.sources:
        if args.nproc or args.hosts or args.sample or args.nodes_only or args.ping:
            raise UsageError("--from measures nothing, so the options of a measurement mean nothing", "leave one out")
        from mldebug.cluster import pair_matrix

        report = pair_matrix(args.sources)
        return 0 if _show(report, args, output) and report.ok else 1
    from mldebug.cluster.pairs._live import Options, measure
    from mldebug.core.hosts import parse_hosts
    from mldebug.core.launch import ssh_options

    options = Options(
        nproc=args.nproc, backend=args.backend, hosts=parse_hosts(args.hosts) if args.hosts else (),
        nodes_only=args.nodes_only, sample=args.sample, bytes=args.bytes, timeout=args.timeout,
        start_timeout=args.start_timeout, collector=args.collector, python=args.remote_python or "",
        ssh=ssh_options(args.ssh_config, args.ssh_option), progress=not args.quiet, ping=args.ping,
    )  # fmt: skip
    if not options.hosts:
        require("torch")
    written: list[bool] = []
    report = measure(options, lambda found: written.append(_show(found, args, output)))
    return 0 if report.ok and all(written) else 1


def _show(report: PairsReport, args: argparse.Namespace, output: str | None) -> bool:
    """The verdict is shown, whatever becomes of the file. Whether that was written."""
    written = True
    try:
        if output is not None:
            report.save(output)
    except MldebugError as error:  # a disk that is full: the measurement is not lost for it
        tell(f"mldebug: {error}\n")
        written = False
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    return written
