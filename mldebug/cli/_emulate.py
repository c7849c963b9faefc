"""`mldebug emulate -- torchrun ... train.py`: a job of several nodes on one machine."""

from __future__ import annotations

import argparse
from textwrap import fill

from mldebug.cli._parser import ScriptParser, add_common, count, file_to_write, seconds, whole
from mldebug.core.errors import UsageError
from mldebug.core.report import emit, tell

EPILOG = """\
examples:
  mldebug emulate --nodes 2 -- torchrun --nproc-per-node 4 train.py
  mldebug emulate --nodes 3 -- bash node.sh {node} {nodes} {master_addr}
  mldebug emulate --plain -- accelerate launch --num_machines {nodes}
      --machine_rank {node} --main_process_ip {master_addr}
      --main_process_port {master_port} --num_processes 4 train.py

The command runs once for each node. torchrun learns of the other nodes by
itself (PET_ variables; its own options win); programs find NNODES, NODE_RANK,
MASTER_ADDR and MASTER_PORT. As root, or where user namespaces are allowed, each
node has a host name and a network of its own; else they are plain processes.
Exit status: that of the first node that failed. Ctrl-C goes to all nodes, a
second one kills."""


class PARSER(ScriptParser):
    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.usage = f"{self.prog} [options] -- torchrun ... train.py [its arguments]"


def add_arguments(parser: ScriptParser) -> None:
    parser.add_argument("--nodes", type=count, default=2, metavar="N", help="how many nodes (default: 2)")
    parser.add_argument("--gpus-per-node", type=whole, default=4, metavar="N", help=_GPUS)
    parser.add_argument("--plain", action="store_true", help="no namespaces: the network of this machine")
    parser.add_argument("--no-prefix", action="store_true", help="pass the output on as it is, without [node0]")
    parser.add_argument("--grace", type=seconds, default=10.0, metavar="S", help=_GRACE)
    parser.add_argument("--timeout", type=seconds, metavar="S", help="end all nodes after S seconds, with status 124")
    add_common(parser, output="write the JSON document to FILE")


_GPUS = "GPUs of a node: its part of those of this machine (default: 4)"
_GRACE = "when a node fails or is asked to end, wait S seconds before the others are ended (default: 10)"


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise UsageError("no command to run", "mldebug emulate --nodes 2 -- torchrun --nproc-per-node 4 train.py")
    from mldebug.ranks import emulate

    def say(line: str) -> None:
        if not args.quiet:
            tell(fill(f"mldebug: {line}", 80, subsequent_indent="    ", break_on_hyphens=False) + "\n")

    report = emulate(
        command,
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        plain=args.plain,
        prefix=not args.no_prefix,
        grace=args.grace,
        timeout=args.timeout,
        stdout=2 if args.json else 1,
        tell=say,
    )
    if args.json or output is not None or not report.ok:
        emit(report, json=args.json, output=output, quiet=args.quiet, beside=True)
    return report.status
