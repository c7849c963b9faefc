"""`mldebug overflow -- train.py`: run a script under the recorder of NaN and inf."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, file_to_write, whole, wholes
from mldebug.cli._script import print_traceback, script_of
from mldebug.cli._streams import StdoutToStderr
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.extras import how_to_install
from mldebug.core.report import emit
from mldebug.core.script import exit_status, script_traceback

if TYPE_CHECKING:
    from mldebug.numerics import NumericsReport

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug overflow -- train.py --lr 1e-3
  mldebug overflow --max-frames 50 -o frames.jsonl -- -m project.train
  torchrun --nproc-per-node 8 -m mldebug overflow -- train.py

The script needs no edit: every model that it calls is watched. Its exit status
is passed on; where it would be 0 it is 1 if an event was found, or if the
recorder stopped the script. The report goes to stderr; with --json it goes to
stdout, and what the script prints goes to stderr."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PAT",
        help="watch only modules whose name matches; repeatable",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PAT", help="leave out modules whose name matches; repeatable"
    )
    parser.add_argument(
        "--max-frames", type=count, default=21, metavar="N", help="frames to show before the event (default: 21)"
    )
    parser.add_argument(
        "--trace-batch-nums",
        type=wholes,
        default=(),
        metavar="N,N",
        help="print every frame of these batches, counted from 0",
    )
    parser.add_argument(
        "--abort-after-batch-num", type=whole, metavar="N", help="stop the script after this batch, counted from 0"
    )
    parser.add_argument(
        "--check",
        choices=("step", "async", "each"),
        default="step",
        help="when to look: at each optimizer step (the default), one step late without waiting, or at every module",
    )
    parser.add_argument(
        "--on-event",
        choices=("raise", "warn", "skip"),
        default="raise",
        help="stop the script (the default), warn and go on, or drop the batch and go on",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw abs max by module and step")
    add_common(parser, output="write the frames to FILE as JSON lines")


def run(args: argparse.Namespace) -> int:
    target, module = script_of(args.script, "overflow")
    output, plot = _files(args)
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        report, status = _run_script(args, target, module, output)
        if report is not None:
            stream = sys.stderr if streams is None else streams.stdout
            emit(report, json=args.json, quiet=args.quiet, no_color=args.no_color, stream=stream)
            if not _plotted(report, plot) or not report.ok:
                status = status or 1
    return status


def _run_script(
    args: argparse.Namespace, target: list[str], module: bool, output: str | None
) -> tuple[NumericsReport | None, int]:
    """What the recorder saw (None: not to be shown) and the status to leave with."""
    from mldebug.numerics import NumericsError, watch_script

    try:
        report = watch_script(
            target,
            module=module,
            max_frames_to_save=args.max_frames,
            trace_batch_nums=args.trace_batch_nums,
            abort_after_batch_num=args.abort_after_batch_num,
            check=args.check,
            on_event=args.on_event,
            include=args.include,
            exclude=args.exclude,
            output=output,
        )
    except NumericsError as exc:
        if "abort_after_batch_num" in exc.message:  # the other reason to stop; its report may have an event too
            last = args.abort_after_batch_num
            print(f"mldebug: stopped after batch {last}, as --abort-after-batch-num asks", file=sys.stderr)
        return exc.report, 1
    except SystemExit as exc:
        return getattr(exc, "report", None), exit_status(exc)
    except KeyboardInterrupt as exc:
        print("mldebug: interrupted", file=sys.stderr)
        return getattr(exc, "report", None), 130
    except BaseException as exc:
        if isinstance(exc, MldebugError) and script_traceback(exc) is None:
            raise  # not the script's: it is not there, or the recorder refuses an option
        print_traceback(exc)
        seen: NumericsReport | None = getattr(exc, "report", None)
        found = seen is not None and (args.json or seen.event is not None)
        return seen if found else None, 1
    return report, 0


def _plotted(report: NumericsReport, path: str | None) -> bool:
    """Draw, and only say so where that fails: the report has been given already."""
    try:
        if path is not None:
            report.plot(path)
    except (MldebugError, OSError) as exc:
        print(f"mldebug: cannot draw {path}: {exc}", file=sys.stderr)
        return False
    return True


def _files(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """The files of --output and --plot, looked at before a run of hours and not after it."""
    output, plot = file_to_write("--output", args.output), file_to_write("--plot", args.plot)
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", how_to_install("plot"))
    return output, plot
