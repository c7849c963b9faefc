"""`mldebug memory -- train.py`: run a script and say what memory it takes, by phase, and what leaks."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, file_to_write, wholes
from mldebug.cli._script import script_of
from mldebug.cli._streams import StdoutToStderr, emit_beside
from mldebug.core.errors import MldebugError
from mldebug.core.script import exit_status, print_traceback, run_script, script_traceback

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug memory -- train.py --lr 1e-3
  mldebug memory -o memory.jsonl -- -m project.train
  torchrun --nproc-per-node 8 -m mldebug memory --ranks 0 -- train.py

Prints a line when each phase ends (init, first forward, first backward, first
optimizer step, steady): `grep "mldebug memory:"` finds them. The report at the
end, after Ctrl-C and SIGTERM too, says what was alive and what grows step after
step, and where it was made; when memory runs out, what was alive then. The
script needs no edit, and its numbers are the same. Its exit status is passed
on; where it would be 0 it is 1 if memory leaks. The report goes to stderr; with
--json it goes to stdout, and what the script prints goes to stderr."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--top", type=count, default=8, metavar="N", help="places of live tensors to show (default: 8)")
    parser.add_argument("--ranks", type=wholes, metavar="N,N", help="only these ranks print (default: all)")
    add_common(parser, output="write what is seen to FILE as JSON lines, as it comes; {rank} in it is replaced")


def run(args: argparse.Namespace) -> int:
    target, module = script_of(args.script, "memory")
    from mldebug.core.world import world

    rank = world().rank
    output = file_to_write("--output", args.output and args.output.replace("{rank}", str(rank)))
    args.quiet = args.quiet or (args.ranks is not None and rank not in args.ranks)
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        from mldebug.core.terminated import LastWord
        from mldebug.perf.memory._watch import memory_watch

        watch = memory_watch(output=output, quiet=args.quiet, top=args.top)

        def report() -> None:
            emit_beside(watch.report, args, streams)

        def last_word() -> None:
            watch.stop(None)
            report()

        try:
            with watch, LastWord(last_word):
                run_script(target, module=module)
            status = 0
        except SystemExit as exc:
            status = exit_status(exc)
        except BaseException as exc:
            if isinstance(exc, MldebugError) and script_traceback(exc) is None:
                raise
            print_traceback(exc)
            status = 130 if isinstance(exc, KeyboardInterrupt) else 1
        report()
    return status if watch.report.ok else status or 1
