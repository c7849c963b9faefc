"""`mldebug dist-test`: which rank, GPU or host keeps a job from starting or from computing right."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mldebug.cli._missing import require
from mldebug.cli._parser import Parser, add_common, add_remote, count, file_to_write, seconds, size
from mldebug.core.errors import UsageError
from mldebug.core.report import emit, write

if TYPE_CHECKING:
    from mldebug.cluster.dist._report import DistTestReport

PARSER = Parser
EPILOG = """\
examples:
  mldebug dist-test
  mldebug dist-test --nproc 4 --backend gloo
  mldebug dist-test --hosts node[01-04] --nproc 8
  srun --ntasks-per-node 8 mldebug dist-test --timeout 15
  torchrun --nnodes 2 --nproc-per-node 8 ... -m mldebug dist-test
  mpirun -np 16 -x MASTER_ADDR=node1 mldebug dist-test --json
  mldebug dist-test --from run.json

Under torchrun, srun or mpirun it is one of their ranks; by itself it starts one
for each accelerator of this host. Ranks report over plain sockets, so that a
hang of NCCL or gloo is named and not waited for. Exit status 1, and the culprit
on the first line, if a rank is missing, stopped, dead, cut off, behind, wrong
or unlike the others."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--nproc", type=count, metavar="N", help="ranks to start on each host (default: its accelerators)"
    )
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "rccl", "gloo", "xccl"), default="auto",
        help="what carries the collectives (default: auto, by the accelerator)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=30.0,
        metavar="S",
        help="name who is behind when no rank got on for S seconds (30)",
    )
    parser.add_argument(
        "--start-timeout", type=seconds, default=180.0, metavar="S", help="the same while ranks load torch (180)"
    )
    parser.add_argument("--bytes", type=_sizes, default=(), metavar="N,N", help="sizes of the collectives: 4,64K,1M,1G")
    parser.add_argument("--hosts", metavar="LIST", help="start the ranks on these over ssh: node[001-016], a,b,c")
    add_remote(parser)
    parser.add_argument("--from", dest="source", metavar="FILE", help="judge what -o or --json wrote, and run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="address, CPUs, PCI, NUMA and links of each rank")
    add_common(parser, output="write the report with its evidence to FILE")


def run(args: argparse.Namespace, lines: Callable[[DistTestReport], str] | None = None) -> int:
    """`lines` are for people and come before the report."""
    from mldebug.cluster.dist._dist_test import Options
    from mldebug.cluster.dist._dist_test import run as run_test
    from mldebug.cluster.dist._evidence import load_evidence
    from mldebug.cluster.dist._report import make_report
    from mldebug.core.hosts import parse_hosts
    from mldebug.core.launch import ssh_options

    output = file_to_write("--output", args.output)
    how = {"json": args.json, "output": output, "quiet": args.quiet, "no_color": args.no_color}
    if args.source is not None:
        if args.nproc or args.hosts:
            raise UsageError("--from runs nothing, so --nproc and --hosts have no meaning", "leave one of them out")
        report = make_report(load_evidence(args.source), args.verbose)
        emit(report, **how)
        return 0 if report.ok else 1
    hosts = parse_hosts(args.hosts) if args.hosts else []
    options = Options(
        nproc=args.nproc, backend=args.backend, timeout=args.timeout, start_timeout=args.start_timeout, hosts=hosts,
        sizes=args.bytes, collector=args.collector, python=args.remote_python or "", output=how, verbose=args.verbose,
        ssh=ssh_options(args.ssh_config, args.ssh_option),
    )  # fmt: skip
    if not hosts:
        require("torch")
    report = run_test(options, lambda found: _show(found, how, "" if lines is None or args.json else lines(found)))
    return 0 if report.ok else 1


def _show(report: DistTestReport, how: dict[str, Any], lines: str) -> None:
    """Rank 0's, as a rule. Where each rank can only speak for itself one gives the document, and the others a line."""
    from mldebug.core.world import claims, world

    rank = max((claim.rank for claim in claims(os.environ)), default=0)
    alone = report.ended == "no collector" and world().rank > 1
    if alone or (rank > 0 and any(one.kind == "apart" for one in report.culprits)):
        write(f"mldebug: rank {rank} on {os.uname().nodename}: {report.culprits[0].reason}\n", sys.stderr)
        time.sleep(1.0)  # launchers end the others as soon as one of them leaves
        return
    if lines and not how["quiet"]:
        write(lines, sys.stdout)
    emit(report, **how)


def _sizes(text: str) -> tuple[int, ...]:
    """`4,64K,1M,1G` in bytes."""
    return tuple(size(word) for word in text.split(","))
