"""`mldebug spy`: which rank of a hung job holds the others up, and why."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mldebug.cli._parser import Parser, add_common, count, file_to_write, seconds
from mldebug.core.errors import UsageError
from mldebug.core.report import emit, tell

if TYPE_CHECKING:
    from mldebug.hang._evidence import Evidence

EPILOG = """\
examples:
  mldebug spy
  mldebug spy --name train.py --native
  mldebug spy --hosts node[001-512]
  mldebug spy --slurm 123456 -o job.html
  mldebug spy --pods app=train --namespace research
  mldebug spy -o now.json; sleep 60; mldebug spy --diff now.json
  mldebug spy --from node1.json --from node2.json --json

Finds the ranks by itself and looks at each of them twice, without stopping
them. The job needs no edit. Other nodes need the same mldebug, and a way in
without a password; each of them looks at its own ranks. A node that does not
answer in time is named in the verdict. Exit status 1 if the job hangs, 0 if it
is slow or fine. FILE may end in .json (for --from and --diff), .html (a page
for a browser), .folded or .speedscope.json (stacks for such viewers)."""


class PARSER(Parser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.usage = f"{self.prog} [options] [--hosts LIST | --slurm JOB | --pods LABELS]"


def add_arguments(parser: Parser) -> None:
    node = parser.add_argument_group("this node")
    node.add_argument("--pid", action="append", type=count, default=[], help="look at this process; repeatable")
    node.add_argument("--name", metavar="TEXT", help="look at processes whose command line has TEXT")
    node.add_argument("--user", metavar="USER", help="look at processes of USER only")
    node.add_argument("--samples", type=count, metavar="N", help="looks at each process (default: 2)")
    node.add_argument("--interval", type=seconds, metavar="S", help="seconds between two looks")
    node.add_argument("--native", action="store_true", help="stacks of C and C++ too; pauses the processes")
    node.add_argument("--locals", action="store_true", help="keep all local variables; they may hold private data")
    node.add_argument("--timeout", type=seconds, metavar="S", help=_TIMEOUT)
    others = parser.add_argument_group("other nodes", "What is above, but for --pid, holds for each of them.")
    others.add_argument("--hosts", metavar="LIST", help="ask these over ssh: node[001-512], a,b,c or user@host")
    others.add_argument("--hostfile", metavar="FILE", help="ask the hosts in FILE over ssh, one on each line")
    others.add_argument("--slurm", metavar="JOB", help="ask the nodes of a SLURM job, by srun --overlap")
    others.add_argument("--pods", metavar="LABELS", help="ask the pods with these labels, by kubectl exec")
    others.add_argument("--remote-python", metavar="PATH", help=_PYTHON)
    others.add_argument("--fanout", type=count, metavar="N", help=_FANOUT)
    others.add_argument("--ssh-config", metavar="FILE", help="configuration file for ssh")
    others.add_argument("--ssh-option", metavar="K=V", action="append", default=[], help=_SSH_OPTION)
    others.add_argument("--namespace", metavar="NAME", help="namespace of the pods")
    others.add_argument("--context", metavar="NAME", help="context of kubectl's configuration")
    others.add_argument("--container", metavar="NAME", help="container, where a pod has more than one")
    others.add_argument("--node", help=argparse.SUPPRESS)  # how other nodes are started
    output = parser.add_argument_group("output")
    output.add_argument("--from", dest="sources", action="append", default=[], metavar="FILE", help=_FROM)
    output.add_argument("--diff", metavar="FILE", help="say who moved since this earlier evidence")
    add_common(output, output="write the evidence to FILE (.json, .html, .folded, .speedscope.json)")


_FANOUT = "hosts asked at a time; more go through gateways (default: 64)"
_SSH_OPTION = "option as in ~/.ssh/config, such as Port=2222; repeatable"
_TIMEOUT = "seconds for the whole command (default: 10; 30 for other nodes, 60 for more than 64)"
_PYTHON = "the Python that has mldebug there (default: the path of this one; python3 in pods)"
_NOBODY = """\
hint: a rank is a process of yours with RANK and WORLD_SIZE in its environment
  (torchrun, accelerate, deepspeed), or Open MPI's, PMI's or SLURM's, or a
  Python process with torch in it. Others are found by --name TEXT, --pid PID or
  --user USER; the ranks of other nodes by --hosts, --slurm or --pods.
"""
_FROM = "judge evidence from FILE and look at nothing; repeatable, one for each node"


def run(args: argparse.Namespace) -> int:
    if args.node is not None:
        from mldebug.hang._remote_node import serve

        return serve(args.node)
    output = file_to_write("--output", args.output)
    chosen = {**_chosen(args), **_elsewhere(args)}
    if args.sources and chosen:
        raise UsageError(
            f"--from looks at no process, so --{next(iter(chosen))} has no meaning", "leave one of them out"
        )
    from mldebug.hang import load_evidence, save_evidence, spy

    earlier = load_evidence([args.diff]) if args.diff else None
    if args.sources:
        evidence: Evidence | None = load_evidence(args.sources)
    else:
        evidence = _remote(args, chosen) if _way(args) else None
    report = spy(evidence, earlier=earlier, **({} if evidence is not None else chosen))
    if output is not None:
        save_evidence(report.evidence, output)
    emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color)
    if report.ok and not report.evidence["ranks"]:
        tell(_NOBODY)
    if _is_interrupted(report.evidence):
        return 130
    return 0 if report.ok else 1


def _remote(args: argparse.Namespace, chosen: dict[str, Any]) -> Evidence:
    from mldebug.core.hosts import parse_hosts, read_hostfile
    from mldebug.core.launch import ssh_options
    from mldebug.hang import collect_remote

    options = {key: value for key, value in chosen.items() if key not in ("hostfile", "ssh_config", "ssh_option")}
    if args.hosts is not None or args.hostfile is not None:
        hosts = read_hostfile(args.hostfile) if args.hostfile is not None else parse_hosts(args.hosts)
        options["hosts"] = hosts
        options["ssh"] = ssh_options(args.ssh_config, args.ssh_option)
        options.setdefault("timeout", 30.0 if len(hosts) <= 64 else 60.0)
    # The deadline is the command's: what it has taken to start counts too.
    options["timeout"] = max(1.0, options.get("timeout", 30.0) - _age())
    with _Progress(quiet=args.quiet) as progress:
        return collect_remote(progress=progress, **options)


def _age() -> float:
    """Seconds since this process was started; 0.0 where that is not known."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stream:
            start = int(stream.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, min(5.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class _Progress:
    """`12 of 512 nodes have answered` on a terminal, while they do."""

    def __init__(self, quiet: bool) -> None:
        self.shows = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self.shown = ""

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._show if self.shows else None

    def _show(self, answered: int, asked: int) -> None:
        text = f"\r{answered} of {asked} nodes have answered"
        if text != self.shown:
            self.shown = text
            sys.stderr.write(text)
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self.shown:
            sys.stderr.write(f"\r{' ' * 50}\r")
            sys.stderr.flush()


def _way(args: argparse.Namespace) -> str:
    """Which other nodes are asked: one of the four options, or "" for this node."""
    ways = [name for name in ("hosts", "hostfile", "slurm", "pods") if getattr(args, name) is not None]
    if len(ways) > 1:
        raise UsageError(f"--{ways[0]} and --{ways[1]} say both where the job runs", "leave one of them out")
    return ways[0] if ways else ""


def _elsewhere(args: argparse.Namespace) -> dict[str, Any]:
    """The options about other nodes that were given."""
    way = _way(args)
    of_way = {
        "ssh_config": ("hosts", "hostfile"), "ssh_option": ("hosts", "hostfile"), "namespace": ("pods",),
        "context": ("pods",), "container": ("pods",), "fanout": ("hosts", "hostfile", "slurm", "pods"),
        "remote_python": ("hosts", "hostfile", "slurm", "pods"),
    }  # fmt: skip
    found: dict[str, Any] = {way: getattr(args, way)} if way else {}
    for name, ways in of_way.items():
        value = getattr(args, name)
        if value not in (None, []):
            if way not in ways:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} has no meaning here", f"it goes with --{' or --'.join(ways)}")
            found["python" if name == "remote_python" else name] = value
    if way and args.pid:
        raise UsageError(f"--pid is a process of this node, and --{way} looks at others", "use --name there")
    return found


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


def _is_interrupted(evidence: Evidence) -> bool:
    from mldebug.hang._remote_gather import INTERRUPTED

    return INTERRUPTED in evidence["notes"]
