"""`mldebug demo`: the recorder at work on a model that is known to overflow."""

from __future__ import annotations

import argparse
import sys

from mldebug.cli._parser import Parser, add_common
from mldebug.core.errors import MldebugError
from mldebug.core.report import emit

PARSER = Parser
EPILOG = """\
It is a real run: a small random T5 is trained in fp16 on the CPU until its feed-forward overflows.
To watch a script of your own:  mldebug overflow -- train.py"""


def add_arguments(parser: Parser) -> None:
    add_common(parser, output="also write the report as JSON to FILE")


def run(args: argparse.Namespace) -> int:
    from mldebug.numerics._demo import run_demo

    show = sys.stderr.isatty() and not args.quiet
    report = run_demo(progress=_to_stderr if show else _nowhere)
    if report.event is None:
        raise MldebugError(
            "the demo trained to its end and met no overflow, though one is planted in it",
            "report this with the output of `mldebug --version` and of `python -m torch.utils.collect_env`",
        )
    emit(report, json=args.json, output=args.output, quiet=args.quiet, no_color=args.no_color)
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nowhere(_line: str) -> None:
    pass
