"""`mldebug printflock -- train.py`: run a script whose lines come out whole."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass

from mldebug.cli._parser import Parser, ScriptParser, add_common, file_to_write, seconds, wholes
from mldebug.cli._script import run_to_its_end, script_of
from mldebug.cli._streams import StdoutToStderr
from mldebug.core.report import Report, emit

PARSER = ScriptParser
EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m mldebug printflock -- train.py --lr 1e-3
  srun -l mldebug printflock --prefix '[{host}:{rank}]' -- -m project.train
  mldebug printflock --ranks 0,7 --no-prefix -- train.py

The script needs no edit: its print, what it writes to stdout and stderr, and
its logging come out in whole lines, with the host and the rank in front. Only
the ranks of --ranks write to stdout; stderr is not cut. A line without its
newline is held until the newline or a flush. What C code and subprocesses write
is left as it is. The exit status is the script's own. --json prints the status
as a document, and what the script prints to stdout goes to stderr."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--prefix",
        default="[{host}:{rank}]",
        metavar="FORMAT",
        help="before every line, of {host} {rank} {local_rank} {world_size} {pid} {time} (default: [{host}:{rank}])",
    )
    parser.add_argument("--no-prefix", action="store_true", help="lines as they are")
    parser.add_argument("--ranks", type=wholes, metavar="N,N", help="only these global ranks write to stdout")
    parser.add_argument(
        "--ordered",
        action="store_true",
        help="print in the order of ranks, once there is a process group; for scripts whose ranks all print alike",
    )
    parser.add_argument(
        "--streams",
        type=_streams,
        default=("stdout", "stderr"),
        metavar="LIST",
        help="what to wrap beside print: stdout,stderr (the default), one of them, or none",
    )
    parser.add_argument("--no-logging", action="store_true", help="leave the handlers of logging alone")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=5.0,
        metavar="S",
        help="pass a process by that has the lock and stands still for S seconds (default: 5)",
    )
    add_common(parser, output="append what goes to stdout to FILE; all ranks may name the same one")


@dataclass(frozen=True)
class PrintflockReport(Report):
    """How the script ended."""

    status: int

    @property
    def ok(self) -> bool:
        return self.status == 0


def run(args: argparse.Namespace) -> int:
    words, module = script_of(args.script, "printflock")
    output = file_to_write("--output", args.output)
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        with _StdoutTo(output, for_good=args.own_process) if output is not None else nullcontext():
            status = _run_script(args, words, module)
        if streams is not None:
            emit(PrintflockReport(status), json=True, stream=streams.stdout)
    return status


def _run_script(args: argparse.Namespace, words: list[str], module: bool) -> int:
    from mldebug.ranks import LockedOutput

    scope = LockedOutput(
        stdout="stdout" in args.streams,
        stderr="stderr" in args.streams,
        logging=not args.no_logging,
        prefix=None if args.no_prefix else args.prefix,
        print_ranks=args.ranks,
        ordered=args.ordered,
        timeout=args.timeout,
    )
    scope.__enter__()
    try:
        return run_to_its_end(words, module)
    finally:
        if args.own_process:  # threads of the script may still print, and what it has registered for its end
            atexit.register(scope.__exit__, None, None, None)
        else:
            scope.__exit__(None, None, None)


class _StdoutTo:
    """While entered, stdout is a file, at its end, for the children of the process too."""

    def __init__(self, path: str, for_good: bool) -> None:
        self._path, self._for_good = path, for_good

    def __enter__(self) -> None:
        self._before = sys.stdout
        self._before.flush()
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._saved = os.dup(1)
        os.dup2(file, 1)
        os.close(file)
        sys.stdout = open(1, "w", encoding=self._before.encoding, errors=self._before.errors, closefd=False)

    def __exit__(self, *_exc: object) -> None:
        sys.stdout.flush()
        if not self._for_good:
            os.dup2(self._saved, 1)
            sys.stdout = self._before
        os.close(self._saved)


def _streams(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip() != "none")
    for word in words:
        if word not in ("stdout", "stderr"):
            raise argparse.ArgumentTypeError(f"{word!r} is not one of stdout, stderr and none")
    return words
