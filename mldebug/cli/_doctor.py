"""`mldebug doctor`: is this machine, or this cluster, fit to train on?"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from typing import Any

from mldebug.cli._parser import Parser, add_common, count, file_to_write, seconds
from mldebug.core.errors import UsageError
from mldebug.core.report import emit, write

PARSER = Parser

EPILOG = """\
examples:
  mldebug doctor
  mldebug doctor --watch 10
  mldebug doctor --load
  mldebug doctor --hosts node[001-512] --json
  mldebug doctor --slurm 123456
  srun --ntasks-per-node=1 mldebug doctor -q -o doctor-%h.json
  mldebug doctor --from doctor-*.json

Reads NVML, /sys and /proc, and runs nothing heavy: idle GPUs have narrow
links and low clocks, so these are judged with --load only, which leaves GPUs
alone that somebody uses. Over several nodes the odd one out is named. What
cannot be seen here is said with the reason. Exit status 1 if something is
bad, 0 otherwise."""


def add_arguments(parser: Parser) -> None:
    node = parser.add_argument_group("what to look at")
    node.add_argument("--watch", type=seconds, metavar="SECONDS", help="see which error counters grow meanwhile")
    node.add_argument("--load", action="store_true", help="some seconds of copies and matmuls on idle GPUs")
    node.add_argument("--timeout", type=seconds, metavar="S", help=_TIMEOUT)
    node.add_argument("--node", action="store_true", help=argparse.SUPPRESS)  # how other nodes are started
    others = parser.add_argument_group("other nodes")
    others.add_argument("--hosts", metavar="LIST", help="ask these over ssh: node[001-512], a,b,c or user@host")
    others.add_argument("--hostfile", metavar="FILE", help="ask the hosts in FILE over ssh, one on each line")
    others.add_argument("--slurm", metavar="JOB", help="ask the nodes of a SLURM job, by srun --overlap")
    others.add_argument("--remote-python", metavar="PATH", help=_PYTHON)
    others.add_argument("--fanout", type=count, metavar="N", help="nodes asked at a time (default: 64)")
    others.add_argument("--ssh-config", metavar="FILE", help="configuration file for ssh")
    others.add_argument("--ssh-option", metavar="K=V", action="append", default=[], help=_SSH_OPTION)
    output = parser.add_argument_group("output")
    output.add_argument("--from", dest="sources", action="extend", nargs="+", default=[], metavar="FILE", help=_FROM)
    add_common(output, output="write evidence and findings to FILE, for --from; %%h in it is the host")


_TIMEOUT = "seconds for all other nodes (default: 30, more with --watch and --load)"
_PYTHON = "the Python that has mldebug there (default: the path of this one)"
_SSH_OPTION = "option as in ~/.ssh/config, such as Port=2222; repeatable"
_FROM = "judge the evidence in these files and look at nothing; one node or more in each"


def run(args: argparse.Namespace) -> int:
    host = socket.gethostname()
    output = file_to_write("--output", args.output.replace("%h", host) if args.output is not None else None)
    options = _options(args)
    if args.node:
        return _serve(args)
    from mldebug.cluster import doctor, load_doctor

    if "hosts" in options or "slurm" in options:
        options["progress"] = _progress(args.quiet)
    report = doctor(load_doctor(args.sources)) if args.sources else doctor(**options)
    emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
    if any(str(note).startswith("interrupted") for note in report.evidence["notes"]):
        return 130
    return 0 if report.ok else 1


def _progress(quiet: bool) -> Callable[[int, int], None] | None:
    """`12 of 512 nodes have answered` on a terminal, while they do."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        return None

    def show(answered: int, asked: int) -> None:
        sys.stderr.write(f"\r{answered} of {asked} nodes have answered" + "\n" * (answered == asked))
        sys.stderr.flush()

    return show


def _serve(args: argparse.Namespace) -> int:
    """As a node that was asked: one line with its evidence, and nothing else on stdout."""
    from mldebug.cluster import collect_doctor
    from mldebug.cluster.health._remote import answer

    evidence = collect_doctor(watch=args.watch, load=args.load)
    write(answer(evidence["nodes"][0]), sys.stdout)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What doctor() is asked for; options that have no meaning together are a UsageError."""
    ways = [name for name in ("hosts", "hostfile", "slurm") if getattr(args, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"--{ways[0]} and --{ways[1]} both say which nodes are asked", "leave one of them out")
    given = [name for name in ("watch", "load", *ways) if getattr(args, name)]
    if args.sources and given:
        raise UsageError(f"--from looks at no machine, so --{given[0]} has no meaning", "leave one of them out")
    options: dict[str, Any] = {"watch": args.watch, "load": args.load}
    remote = {"timeout": args.timeout, "python": args.remote_python, "fanout": args.fanout}
    remote = {name: value for name, value in remote.items() if value is not None}
    if not ways:
        wanted = [*remote, *(name for name in ("ssh_config", "ssh_option") if getattr(args, name))]
        if wanted:
            flag = {"python": "remote-python"}.get(wanted[0], wanted[0].replace("_", "-"))
            raise UsageError(f"--{flag} has no meaning here", "it goes with --hosts, --hostfile or --slurm")
        return options
    options.update(remote)
    if args.slurm is not None:
        return {**options, "slurm": args.slurm}
    from mldebug.core.hosts import parse_hosts, read_hostfile
    from mldebug.core.launch import ssh_options

    hosts = read_hostfile(args.hostfile) if args.hostfile is not None else parse_hosts(args.hosts)
    return {**options, "hosts": hosts, "ssh": ssh_options(args.ssh_config, args.ssh_option)}
