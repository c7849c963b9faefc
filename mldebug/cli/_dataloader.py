"""`mldebug dataloader`: measure the DataLoader of a script, or one that a function makes."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from mldebug.cli._parser import Parser, ScriptParser, add_common, count, file_to_write, seconds, whole, wholes
from mldebug.cli._script import run_to_its_end, script_of
from mldebug.cli._streams import StdoutToStderr, emit_beside
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import emit, write
from mldebug.core.world import world

if TYPE_CHECKING:
    from mldebug.perf.loader._report import DataloaderReport

PARSER = ScriptParser
EPILOG = """\
examples:
  mldebug dataloader -- train.py --lr 1e-3
  mldebug dataloader --steps 0 --step-seconds 0.25 -- -m project.train
  mldebug dataloader --loader 1 --seconds 120 -- train.py
  mldebug dataloader --batch-size 64 project.data:make_dataset
  torchrun --nproc-per-node 8 -m mldebug dataloader -- train.py

A script runs until it has trained --steps steps with its first DataLoader: that
says how long a step takes. Then, in the place of the training, the loader's own
dataset, samplers and collate_fn are measured with other settings, and the
script ends by SystemExit. A function (module:function or file.py:function) is
called and returns a DataLoader or a dataset. The report goes to stderr where a
script runs; with --json it goes to stdout. Exit status 1 if the loader holds
training up whatever was tried, or fails."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--steps", type=whole, default=20, metavar="N", help="steps of the script to time first (default: 20)")
    add("--step-seconds", type=seconds, metavar="S", help="how long a step takes, instead of timing it")
    add("--loader", type=whole, default=0, metavar="N", help="the script's Nth DataLoader, from 0 as first iterated")
    add("--seconds", type=seconds, default=60.0, metavar="S", help="how long to measure (default: 60)")
    add("--timeout", type=seconds, default=30.0, metavar="S", help="a batch that takes longer is an error (30)")
    add("--num-workers", type=wholes, metavar="N,N", help="the counts to try (default: until more bring nothing)")
    add("--max-workers", type=count, metavar="N", help="try no more than this many")
    add("--prefetch", type=wholes, default=(2, 4), metavar="N,N", help="prefetch factors to try (default: 2,4)")
    add("--batch-size", type=count, default=32, metavar="N", help="for a function that returns a dataset (32)")
    add("--device", metavar="KIND", help="copy batches to cuda, rocm, xpu, mps or cpu (default: what is here)")
    add_common(parser, output="write the report to FILE as JSON")


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    words = args.script[1:] if args.script[:1] == ["--"] else args.script
    if words and re.fullmatch(r"[\w./\\-]+:[A-Za-z_][\w.]*", words[0]) and not os.path.exists(words[0]):
        if len(words) > 1:
            raise UsageError(f"{words[0]} is called without arguments: {' '.join(words[1:])}", "options go before it")
        return _of_function(args, words[0], output)
    target, module = script_of(args.script, "dataloader")
    return _of_script(args, target, module, output)


def _of_function(args: argparse.Namespace, name: str, output: str | None) -> int:
    # What it prints on the way goes to stderr under --json.
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        status = 0
        try:
            report: DataloaderReport | None = _bench(args, _made_by(name), args.step_seconds)
        except KeyboardInterrupt as exc:
            report, status = getattr(exc, "report", None), 130
        if report is None:
            raise KeyboardInterrupt
        _clear_line()
        stream = sys.stdout if streams is None else streams.stdout
        emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color, stream=stream)
    return status or (0 if report.ok else 1)


def _of_script(args: argparse.Namespace, target: list[str], module: bool, output: str | None) -> int:
    from mldebug.perf.loader._script import ScriptLoader

    def bench(loader: Any, step: float | None) -> DataloaderReport:
        return _bench(args, loader, args.step_seconds or step)

    steps = 0 if args.step_seconds is not None else args.steps
    with StdoutToStderr(for_good=args.own_process) if args.json else nullcontext() as streams:
        with ScriptLoader(bench, steps, args.loader) as watched:
            status = run_to_its_end(target, module)
            if watched.loader is not None and not watched.measured and status == 0:
                watched.finish()  # it took a batch or two, and ended
        if watched.failure is not None:
            raise watched.failure
        if watched.report is None:
            if status == 0:
                raise MldebugError(_without(target[0], watched.seen, args.loader), _ELSEWHERE)
            if streams is not None:  # its traceback is on stderr, and its status is passed on
                error = {"message": f"{target[0]} ended with status {status} before its DataLoader was measured"}
                write(json.dumps({"schema": 1, "ok": False, "error": error}) + "\n", streams.stdout)
            return status
        report = watched.report
        _clear_line()
        if world().rank == 0:
            emit_beside(report, args, streams, output=output)
    return status or (0 if report.ok else 1)


_ELSEWHERE = (
    "other iterators of data, and DataLoaders of processes that it spawns, are not watched; "
    "`mldebug dataloader FILE.py:FUNCTION` measures what a function returns"
)


def _without(script: str, seen: int, wanted: int) -> str:
    """Why no DataLoader was measured, where the script iterated `seen`."""
    if not seen:
        return f"{script} ended and iterated no DataLoader of torch"
    have = "1 DataLoader" if seen == 1 else f"{seen} DataLoaders"
    return f"{script} ended and iterated {have}; --loader {wanted} would be number {wanted + 1}"


def _bench(args: argparse.Namespace, dataset: Any, step: float | None) -> DataloaderReport:
    from mldebug.perf.loader._bench import dataloader_bench

    return dataloader_bench(
        dataset,
        batch_size=args.batch_size,
        step_seconds=step,
        num_workers=args.num_workers,
        prefetch_factors=args.prefetch,
        max_workers=args.max_workers,
        device=args.device,
        seconds=args.seconds,
        timeout=args.timeout,
        progress=_show if sys.stderr is not None and sys.stderr.isatty() and not args.quiet else None,
    )


def _made_by(name: str) -> Any:
    """What a function returns; an object that is none is taken as it is."""
    place, _, attribute = name.rpartition(":")
    sys.path.insert(0, os.getcwd())
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(os.path.basename(place)[:-3], place)
            if spec is None or spec.loader is None or not os.path.isfile(place):
                raise UsageError(f"cannot load {place}: no such file", f"the current folder is {os.getcwd()}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # so that workers that are spawned find its classes
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{place}.".startswith(f"{exc.name}."):
            raise
        raise UsageError(
            f"no module named {place}", f"modules are looked for in {os.getcwd()} and PYTHONPATH"
        ) from None
    made: Any = module
    for part in attribute.split("."):
        if not hasattr(made, part):
            raise UsageError(f"{place} has no {attribute}", "name a function of it that returns a DataLoader")
        made = getattr(made, part)
    streams = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    return made() if callable(made) and (isinstance(made, type) or not streams) else made


def _show(line: str) -> None:
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _clear_line() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
