"""`mldebug spy`: which rank of a hung job holds the others up, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.errors import UsageError
from mldebug.core.report import emit

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
        self.usage = f"{self.prog} [--hosts LIST | --hostfile FILE | --slurm JOB | --pods LABELS] [options]"


def add_arguments(parser: Parser) -> None:
    node = _Group(parser, "this node")
    node("--pid", action="append", type=_count, default=[], help="look at this process; repeatable")
    node("--name", metavar="TEXT", help="look at processes whose command line has TEXT")
    node("--user", metavar="USER", help="look at processes of USER only")
    node("--samples", type=_count, metavar="N", help="looks at each process (default: 2)")
    node("--interval", type=_seconds, metavar="S", help="seconds between two looks")
    node("--native", action="store_true", help="stacks of C and C++ too; pauses the processes")
    node("--locals", action="store_true", help="keep all local variables; they may hold private data")
    node("--timeout", type=_seconds, metavar="S", help=_TIMEOUT)
    others = _Group(parser, "other nodes", "What is above holds for each of them, but for --pid.")
    others("--hosts", metavar="LIST", help="ask these over ssh: node[001-512], a,b,c or user@host")
    others("--hostfile", metavar="FILE", help="ask the hosts in FILE over ssh, one on each line")
    others("--slurm", metavar="JOB", help="ask the nodes of a SLURM job, by srun --overlap")
    others("--pods", metavar="LABELS", help="ask the pods with these labels, by kubectl exec: app=train")
    others("--remote-python", metavar="PATH", help=_PYTHON)
    others("--fanout", type=_count, metavar="N", help="hosts asked at a time; more go through gateways (default: 64)")
    others("--ssh-config", metavar="FILE", help="configuration file for ssh")
    others("--ssh-option", metavar="K=V", action="append", default=[], help="as in ~/.ssh/config; repeatable")
    others("--namespace", "-n", metavar="NAME", help="of the pods")
    others("--context", metavar="NAME", help="of kubectl's configuration")
    others("--container", metavar="NAME", help="of the pods, where they have more than one")
    others("--node", help=argparse.SUPPRESS)  # how the other nodes are started
    output = _Group(parser, "output")
    output("--from", dest="sources", action="append", default=[], metavar="FILE", help=_FROM)
    output("--diff", metavar="FILE", help="say who moved since this earlier evidence")
    add_common(cast("Parser", output), output="write the evidence to FILE (.json, .html, .folded, .speedscope.json)")


_TIMEOUT = "seconds for the whole command (default: 10; 30 for other nodes, 60 for more than 64)"
_PYTHON = "the Python that has mldebug there (default: the path of this one; python3 in pods)"
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
    if _is_interrupted(report.evidence):
        return 130
    return 0 if report.ok else 1


def _remote(args: argparse.Namespace, chosen: dict[str, Any]) -> Evidence:
    from mldebug.core.hosts import parse_hosts, read_hostfile
    from mldebug.core.launch import ssh_options
    from mldebug.hang._remote import collect_remote

    options = {key: value for key, value in chosen.items() if key not in ("hostfile", "ssh_config", "ssh_option")}
    if args.hosts is not None or args.hostfile is not None:
        hosts = read_hostfile(args.hostfile) if args.hostfile is not None else parse_hosts(args.hosts)
        options["hosts"] = hosts
        options["ssh"] = ssh_options(args.ssh_config, args.ssh_option)
        options.setdefault("timeout", 30.0 if len(hosts) <= 64 else 60.0)
    with _Progress(quiet=args.quiet) as progress:
        return collect_remote(progress=progress, **options)


class _Progress:
    """`12 of 512 nodes have answered` on a terminal, while they do."""

    def __init__(self, quiet: bool) -> None:
        self.shows = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self.shown = False

    def __enter__(self) -> Callable[[int, int], None] | None:
        return self._show if self.shows else None

    def _show(self, answered: int, asked: int) -> None:
        self.shown = True
        sys.stderr.write(f"\r{answered} of {asked} nodes have answered")
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


class _Group:
    """A group of options in --help that takes `--a_b` for `--a-b` as the parser itself does."""

    def __init__(self, parser: Parser, title: str, description: str | None = None) -> None:
        self.group = parser.add_argument_group(title, description)

    def __call__(self, *flags: str, **kwargs: Any) -> None:
        hidden = [f"--{flag[2:].replace('-', '_')}" for flag in flags if flag.startswith("--")]
        action = self.group.add_argument(*flags, *(flag for flag in hidden if flag not in flags), **kwargs)
        action.option_strings = list(flags)

    add_argument = __call__


def _is_interrupted(evidence: Evidence) -> bool:
    from mldebug.hang._remote_gather import INTERRUPTED

    return INTERRUPTED in evidence["notes"]


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
