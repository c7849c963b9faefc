"""`mldebug demo`: the recorder at work on a model that is known to overflow."""

from __future__ import annotations

import argparse
import sys
from io import StringIO
from typing import TYPE_CHECKING

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.errors import MldebugError
from mldebug.core.report import emit, tell

if TYPE_CHECKING:
    from mldebug.numerics import NumericsReport

PARSER = Parser
EPILOG = """\
It is a real run: a small random T5 is trained in fp16 on the CPU until its
feed-forward overflows. The overflow is what the demo is for, so its exit
status is 0 although an event is found, and 1 if none is.

To watch a script of your own:  mldebug overflow -- train.py"""


def add_arguments(parser: Parser) -> None:
    add_common(parser, output="also write the report as JSON to FILE")


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    show = sys.stderr is not None and sys.stderr.isatty() and not args.quiet
    status = 0
    try:
        from mldebug.numerics._demo import run_demo

        report = run_demo(progress=_to_stderr if show else _nowhere)
    except KeyboardInterrupt as exc:
        seen: NumericsReport | None = getattr(exc, "report", None)
        if seen is None:  # it had not begun to train
            raise
        report, status = seen, 130
        tell("mldebug: interrupted\n")
    if report.event is None and status == 0:
        raise MldebugError(
            "the demo trained to its end and met no overflow, though one is planted in it",
            "report this with the output of `mldebug --version` and of `python -m torch.utils.collect_env`",
        )
    # The overflow is what the demo is for and no trouble: under -q there is nothing to say of it.
    stream = StringIO() if args.quiet and not args.json else None
    emit(report, json=args.json, output=output, no_color=args.no_color, stream=stream)
    return status


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nowhere(_line: str) -> None:
    pass
