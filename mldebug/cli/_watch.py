"""`mldebug watch`: run a job, and say which rank holds it up when it hangs."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from mldebug.cli._parser import ScriptParser, add_common, file_to_write, seconds
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import emit, tell

if TYPE_CHECKING:
    from mldebug.hang import SpyReport

EPILOG = """\
examples:
  mldebug watch -- torchrun --nproc-per-node 8 train.py
  mldebug watch --timeout 120 --on-hang spy,kill -- accelerate launch train.py
  mldebug watch --json --on-hang spy,kill -- python train.py > verdict.json

Looks at the ranks from time to time, without stopping them. A job that is slow
is left alone. The exit status is the job's own, and 1 if it hung. The report
goes to stderr; under --json it goes to stdout, and the job's output to stderr.
Ctrl-C and signals go to the job, and a second Ctrl-C ends all of it. Where
this command is killed (kill -9) the job goes on, unwatched."""


class PARSER(ScriptParser):
    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.usage = f"{self.prog} [options] -- torchrun ... train.py [its arguments]"


def add_arguments(parser: ScriptParser) -> None:
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="S", help=_TIMEOUT)
    parser.add_argument("--on-hang", type=_actions, default=("spy",), metavar="LIST", help=_ON_HANG)
    add_common(parser, output="write the evidence to FILE, for `mldebug spy --from`")


_TIMEOUT = "it hangs when nothing has moved for S seconds (default: 300)"
_ON_HANG = "spy: say why; spy,kill: and end the job with all that it started (default: spy)"


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise UsageError("no command to watch", "mldebug watch -- torchrun --nproc-per-node 4 train.py")
    from mldebug.hang._watch import watch

    saved: list[bool] = []

    def alarm(report: SpyReport) -> None:
        if not args.json:
            emit(report, quiet=args.quiet, no_color=args.no_color, beside=True)
        if output is not None:  # now, since somebody may end it all before the job does
            saved.append(_save(report, output))

    stdout = 2 if args.json else None
    report = watch(command, timeout=args.timeout, on_hang=args.on_hang, on_alarm=alarm, stdout=stdout)
    if args.json:
        emit(report, json=True)
    elif report.killed:
        tell(f"\nmldebug: {report.ending}\n")
    if output is not None and not saved:
        saved.append(_save(report.spy, output))
    return 1 if report.verdict.hung or not (report.status or all(saved)) else report.status


def _save(report: SpyReport, output: str | os.PathLike[str]) -> bool:
    """A full disk is told, and changes nothing else: the job's status counts, and the verdict is out already."""
    from mldebug.hang import save_evidence

    try:
        save_evidence(report.evidence, output)
    except MldebugError as exc:
        tell(f"mldebug: {exc}\n")
        return False
    return True


def _actions(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        if word not in ("spy", "kill"):
            raise argparse.ArgumentTypeError(f"{word!r} is not one of spy and kill")
    return words
