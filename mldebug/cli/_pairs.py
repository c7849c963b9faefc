"""`mldebug pairs`: which GPU, node or path of a cluster is bad."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mldebug.cli._parser import Parser, add_common, add_remote, count, file_to_write, seconds
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

if TYPE_CHECKING:
    from mldebug.cluster._pairs_report import PairsReport

PARSER = Parser
EPILOG = """\
examples:
  mldebug pairs
  mldebug pairs --nproc 4 --backend gloo
  mldebug pairs --hosts node[01-16] -o pairs.json
  srun --ntasks-per-node 8 mldebug pairs --sample
  mldebug pairs --hosts a,b,c --nodes-only
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
    parser.add_argument("--nodes-only", action="store_true", help="nodes against nodes: busbw of all their GPUs")
    parser.add_argument("--sample", action="store_true", help="a dozen rounds, however many nodes there are")
    parser.add_argument("--bytes", type=_size, default=0, metavar="N", help="size of a message: 64M (256M; CPUs 4M)")
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
    output = file_to_write("--output", args.output)
    if args.sources:
        if args.nproc or args.hosts or args.sample or args.nodes_only:
            raise UsageError("--from measures nothing, so the options of a measurement mean nothing", "leave one out")
        from mldebug.cluster import pair_matrix

        report = pair_matrix(args.sources)
        _show(report, args, output)
        return 0 if report.ok else 1
    from mldebug.cluster._pairs_live import Options, measure
    from mldebug.core.hosts import parse_hosts
    from mldebug.core.launch import ssh_options

    options = Options(
        nproc=args.nproc, backend=args.backend, hosts=parse_hosts(args.hosts) if args.hosts else (),
        nodes_only=args.nodes_only, sample=args.sample, bytes=args.bytes, timeout=args.timeout,
        start_timeout=args.start_timeout, collector=args.collector, python=args.remote_python or "",
        ssh=ssh_options(args.ssh_config, args.ssh_option), progress=not args.quiet,
    )  # fmt: skip
    report = measure(options, lambda found: _show(found, args, output))
    return 0 if report.ok else 1


def _show(report: PairsReport, args: argparse.Namespace, output: str | None) -> None:
    if output is not None:
        report.save(output)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)


def _size(text: str) -> int:
    """`64M` in bytes."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in ("", "K", "M", "G") or not 8 <= int(number) << _UNITS[unit] <= 1 << 36:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 64K, 64M or 1G")
    return int(number) << _UNITS[unit]


_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
