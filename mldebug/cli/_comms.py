"""`mldebug comms` and `mldebug allreduce`: how fast are the collectives here, and is what they deliver right?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mldebug.cli._missing import require
from mldebug.cli._parser import Parser, add_common, add_remote, count, file_or_picture_to_write, seconds, size, whole
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

if TYPE_CHECKING:
    from mldebug.cluster.collectives._options import Options
    from mldebug.cluster.collectives._report import CommsReport

PARSER = Parser
EPILOG = """\
examples:
  mldebug comms all_reduce
  mldebug comms all -b 1M -e 1G -d bf16
  mldebug comms all_gather reduce_scatter -o links.jsonl
  mldebug comms all_reduce -b 8 -e 128M -n 50 -G 20
  mldebug comms all_reduce --min-busbw 400 || page_someone
  mldebug comms --profile-stability 512M
  mldebug comms --objects
  mldebug comms --nproc 4 --backend gloo
  srun --ntasks-per-node 8 mldebug comms all_reduce
  mldebug comms --from links.jsonl

-b -e -f -i -n -w -c -z -G -d -r are those of nccl-tests, and so are its
columns, algbw and busbw. Under torchrun, srun or mpirun it is one of their
ranks; by itself it starts one for each GPU, here or on each of --hosts. FILE
is whole at any time, also when the run is killed. Exit status 1 if contents
are wrong, a rank hangs or dies, or busbw is below --min-busbw."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("collectives", nargs="*", metavar="COLLECTIVE", help="all_reduce (default), all_gather, "
        "reduce_scatter, alltoall, broadcast, reduce, gather, scatter, sendrecv, or all")  # fmt: skip
    add_sizes(parser)
    parser.add_argument("-i", "--stepbytes", type=size, default=0, metavar="SIZE", help="add SIZE, not a factor")
    parser.add_argument("-d", "--datatype", default="float", metavar="LIST", help="float,bf16,half,int8 ... or all")
    parser.add_argument("--op", default="sum", metavar="OP", help="sum (default), prod, min, max or avg")
    parser.add_argument("-r", "--root", type=whole, default=0, metavar="RANK", help="of those that have one (0)")
    parser.add_argument("-c", "--check", type=whole, default=1, metavar="N", help="check the contents N times (1)")
    parser.add_argument("-z", "--blocking", type=whole, nargs="?", const=1, default=0, metavar="0|1",
        help="a barrier before each call, not counted")  # fmt: skip
    parser.add_argument("-G", "--cudagraph", type=whole, metavar="N",
        help="replay a CUDA graph N times; 0: never (default: 20 below 16M)")  # fmt: skip
    parser.add_argument("--in-place", action="store_true", help="in place only, where a collective has it")
    parser.add_argument("--profile-stability", type=size, default=0, metavar="SIZE", help="one SIZE, call by call")
    parser.add_argument("--objects", type=count, nargs="?", const=1000, default=0, metavar="N",
        help="N calls of all_gather_object against tensors (1000)")  # fmt: skip
    parser.add_argument("--wide", action="store_true", help="all columns of nccl-tests, 118 wide")
    parser.add_argument("--plot", action="store_true", help="busbw as bars, too")
    parser.add_argument("--from", dest="source", metavar="FILE", help="show the .json or .jsonl of an earlier run")
    add_start(parser)


def add_sizes(parser: Parser) -> None:
    parser.add_argument("-b", "--minbytes", type=size, default=32 << 10, metavar="SIZE", help="first payload (32K)")
    parser.add_argument("-e", "--maxbytes", type=size, default=0, metavar="SIZE", help="last payload (16G; CPUs 16M)")
    parser.add_argument("-f", "--stepfactor", type=_factor, default=2.0, metavar="X", help="next payload: X times (2)")
    parser.add_argument("-n", "--iters", type=count, default=0, metavar="N", help="calls (20, fewer if they are slow)")
    parser.add_argument("-w", "--warmup-iters", type=whole, default=5, metavar="N", help="calls before these (5)")


def add_start(parser: Parser) -> None:
    parser.add_argument(
        "-g", "--nproc", type=count, metavar="N", help="ranks to start on each host (default: its GPUs)"
    )
    parser.add_argument("--hosts", metavar="LIST", help="start them on these hosts over ssh: node[001-016], a,b,c")
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "rccl", "gloo", "xccl"), default="auto", help="default: by the GPU"
    )
    parser.add_argument("--min-busbw", type=float, default=0.0, metavar="GBPS", help="exit status 1 below this")
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="a step that takes longer hangs (60)"
    )
    parser.add_argument(
        "--start-timeout", type=seconds, default=180.0, metavar="S", help="the same for loading torch (180)"
    )
    add_remote(parser)
    add_common(parser, output="write to FILE: .jsonl, .json, .csv, .md or .png")


def run(args: argparse.Namespace) -> int:
    output = file_or_picture_to_write("--output", args.output) or ""
    if args.source:
        from mldebug.cluster.collectives._launch import read_report
        from mldebug.cluster.collectives._save import Saver

        report = read_report(args.source)
        with Saver(output) as saver:
            saver.end(report)
        _show(report, args)
        return 0 if report.ok else 1
    return measure(args, options_of(args, output))


def options_of(args: argparse.Namespace, output: str) -> Options:
    from mldebug.cluster.collectives._options import Options
    from mldebug.cluster.collectives._table import ALL_DTYPES, COLLECTIVES
    from mldebug.core.hosts import parse_hosts
    from mldebug.core.launch import ssh_options

    graphs = args.cudagraph
    if args.blocking and graphs:
        raise UsageError("-z and -G do not go together", "leave one of them out")
    mode = "barrier" if args.blocking else "auto" if graphs is None else "graph" if graphs else "queued"
    kinds = ALL_DTYPES if args.datatype == "all" else tuple(args.datatype.split(","))
    names = [name for word in args.collectives for name in word.split(",")] or ["all_reduce"]
    return Options(
        collectives=tuple(COLLECTIVES) if names == ["all"] else tuple(names), dtypes=kinds, op=args.op, root=args.root,
        first=args.minbytes, last=args.maxbytes, factor=args.stepfactor, step=args.stepbytes, iters=args.iters,
        warmup=args.warmup_iters, check=args.check, mode=mode, launches=graphs or 20, in_place_only=args.in_place,
        stability=args.profile_stability, objects=args.objects, nproc=args.nproc, backend=args.backend,
        hosts=parse_hosts(args.hosts) if args.hosts else (), timeout=args.timeout, start_timeout=args.start_timeout,
        collector=args.collector, python=args.remote_python or "", ssh=ssh_options(args.ssh_config, args.ssh_option),
        min_busbw=args.min_busbw, output=output, progress=not args.quiet,
    )  # fmt: skip


def measure(args: argparse.Namespace, options: Options) -> int:
    from mldebug.cluster.collectives._launch import launch
    from mldebug.cluster.collectives._options import check_options

    check_options(options)
    if not options.hosts:
        require("torch")
    report = launch(options, lambda found: _show(found, args))
    return 0 if report.ok else 1


def _show(report: CommsReport, args: argparse.Namespace) -> None:
    if not args.json and getattr(args, "wide", False) and not (args.quiet and report.ok):
        print(report.text(width=118), end="")
    else:
        emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    if not args.json and getattr(args, "plot", False) and report.rows:
        print(report.plot_text())


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor above 1")
    return value
