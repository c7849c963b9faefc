"""`mldebug overflow -- train.py`: run a script under the recorder of NaN and inf."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, file_to_write, whole, wholes
from mldebug.cli._script import script_of
from mldebug.cli._streams import StdoutToStderr, emit_beside
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.extras import how_to_install
from mldebug.core.report import tell
from mldebug.core.script import exit_status, print_traceback, script_traceback
from mldebug.core.terminated import finished_first
from mldebug.core.world import world

if TYPE_CHECKING:
    from mldebug.numerics import NumericsReport

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug overflow -- train.py --lr 1e-3
  mldebug overflow --max-frames 50 -o frames.jsonl -- -m project.train
  mldebug overflow --html report.html -- train.py
  torchrun --nproc-per-node 8 -m mldebug overflow -- train.py

The script needs no edit: every model that it calls is watched. Its exit status
is passed on; where it would be 0 it is 1 if an event was found, or if the
recorder stopped the script. The report goes to stderr; with --json it goes to
stdout, and what the script prints goes to stderr. A job that is ended by
SIGTERM (its time is over, another rank has failed) reports before it goes."""


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
    parser.add_argument(
        "--dump-dir",
        metavar="DIR",
        help="write the steps of events to DIR: inputs, random states, and a repro.py of the operation",
    )
    parser.add_argument(
        "--backward", action="store_true", help="measure the gradients of module outputs too, with hooks on them"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw abs max by module and step")
    parser.add_argument(
        "--html",
        metavar="FILE.html",
        help="write the report as a page for a browser, with a map of abs max and headroom by module and step",
    )
    add_common(parser, output="write the frames to FILE as JSON lines")


def run(args: argparse.Namespace) -> int:
    target, module = script_of(args.script, "overflow")
    output, plot, html = _files(args)
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:

        def show(report: NumericsReport) -> bool:
            with finished_first():  # a launcher ends the other ranks as soon as one has failed
                emit_beside(report, args, streams)
                return all([_written(report.plot, plot, "draw"), _written(report.html, html, "write")])

        report, status = _run_script(args, target, module, output, show)
        if report is not None and not (show(report) and report.ok):
            status = status or 1
    return status


def _run_script(
    args: argparse.Namespace,
    target: list[str],
    module: bool,
    output: str | None,
    last_word: Callable[[NumericsReport], object],
) -> tuple[NumericsReport | None, int]:
    """What the recorder saw (None: not to be shown) and the status to leave with."""
    from mldebug.numerics import NumericsError, watch_script

    try:
        report = watch_script(
            target,
            module=module,
            last_word=last_word,
            max_frames_to_save=args.max_frames,
            trace_batch_nums=args.trace_batch_nums,
            abort_after_batch_num=args.abort_after_batch_num,
            check=args.check,
            on_event=args.on_event,
            backward=args.backward,
            include=args.include,
            exclude=args.exclude,
            output=output,
            dump_dir=_folder("--dump-dir", args.dump_dir),
        )
    except NumericsError as exc:
        if "abort_after_batch_num" in exc.message:  # the other reason to stop; its report may have an event too
            last = args.abort_after_batch_num
            tell(f"mldebug: stopped after batch {last}, as --abort-after-batch-num asks\n")
        return exc.report, 1
    except SystemExit as exc:
        return getattr(exc, "report", None), exit_status(exc)
    except KeyboardInterrupt as exc:
        tell("mldebug: interrupted\n")
        return getattr(exc, "report", None), 130
    except BaseException as exc:
        if isinstance(exc, MldebugError) and script_traceback(exc) is None:
            raise  # not the script's: it is not there, or the recorder refuses an option
        print_traceback(exc)
        seen: NumericsReport | None = getattr(exc, "report", None)
        found = seen is not None and (args.json or seen.event is not None)
        return seen if found else None, 1
    return report, 0


def _written(write: Callable[[str], object], path: str | None, verb: str) -> bool:
    """Write one picture or page, and only say so where that fails: the report has been given already."""
    try:
        if path is not None:
            write(path)
    except (MldebugError, OSError) as exc:
        tell(f"mldebug: cannot {verb} {path}: {exc}\n")
        return False
    return True


def _files(args: argparse.Namespace) -> tuple[str | None, str | None, str | None]:
    """The files of --output, --plot and --html, looked at before a run of hours and not after it."""
    output, plot = file_to_write("--output", args.output), file_to_write("--plot", args.plot)
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", how_to_install("plot"))
    html = file_to_write("--html", args.html)
    return output, plot, None if html is None else _of_rank(html)


def _folder(option: str, path: str | None) -> str | None:
    """A folder that is there or can be made; else a UsageError before the run."""
    if path is None:
        return None
    above = os.path.abspath(path)
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise UsageError(f"{option} {path}: {above} is a file", "name a folder")
    if not os.access(above, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write in {above}", "choose another folder")
    return path


def _of_rank(path: str) -> str:
    """Of several ranks each writes a page of its own: `report.html` becomes `report.rank3.html`."""
    here = world()
    if here.world_size == 1:
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank{here.rank}{suffix}"
