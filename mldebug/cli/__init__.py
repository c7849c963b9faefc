"""The command line: a table of commands, each in a small module that is loaded when it is called."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Sequence

from mldebug import __version__
from mldebug.cli._parser import Parser
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import tell, write

# Command -> (module, the trouble it is for, what it does), by kinds of trouble. The module has PARSER, EPILOG,
# add_arguments(parser) and run(args) -> int.
COMMANDS = {
    "overflow": (
        "mldebug.cli.overflow",
        "the loss or a weight turned to NaN or inf",
        "run a training script and stop where the first NaN or inf appears",
    ),
    "compare": (
        "mldebug.cli._compare",
        "the same weights give other logits elsewhere",
        "name the first module where two recorded runs part",
    ),
    "spy": (
        "mldebug.cli._spy",
        "it hangs now: which rank, where, and why?",
        "name the rank, the line and the reason when a job hangs",
    ),
    "watch": (
        "mldebug.cli._watch",
        "it hangs now and then, at night",
        "run a job, and say which rank holds it up as soon as it hangs",
    ),
    "trace": (
        "mldebug.cli._trace",
        "it dies without a word: killed, a segfault, an exit code",
        "run a script and keep its last lines on disk, whatever ends it",
    ),
    "trace-tail": (
        "mldebug.cli._trace_tail",
        "which rank stopped first, and where did they part?",
        "read the traces of all ranks of a job together",
    ),
    "memory": (
        "mldebug.cli._memory",
        "it runs out of memory, or takes more with each step",
        "run a script: what takes memory in each phase, and what leaks",
    ),
    "dataloader": (
        "mldebug.cli._dataloader",
        "the GPUs wait for data",
        "find num_workers, prefetch and pinning for a script's own DataLoader",
    ),
    "mfu": (
        "mldebug.cli._mfu",
        "half the speed that others report: how far from the ceiling?",
        "turn tokens per second into MFU and the share of the measured ceiling",
    ),
    "mamf": (
        "mldebug.cli._mamf",
        "how fast can this card really go?",
        "find how many TFLOPS matrix products reach, sustained and in a burst",
    ),
    "comms": (
        "mldebug.cli._comms",
        "are the links as fast as they should be?",
        "measure the collectives of nccl-tests in torch, and check what arrives",
    ),
    "allreduce": (
        "mldebug.cli._allreduce",
        "how fast is all_reduce here?",
        "busbw of all_reduce over all GPUs, in a line",
    ),
    "dist-test": (
        "mldebug.cli._dist_test",
        "a rank, a GPU or a host is bad, and the job only hangs",
        "test all ranks and name who is missing, stopped, cut off or wrong",
    ),
    "pairs": (
        "mldebug.cli._pairs",
        "node 17? one GPU, node or link is slow, and nobody knows which",
        "name the GPU, node or path that is bad, from the bandwidths of all pairs",
    ),
    "doctor": (
        "mldebug.cli._doctor",
        "is this machine fit to train on?",
        "look at GPUs, links, limits and settings, and name what is bad",
    ),
    "numa": (
        "mldebug.cli._numa",
        "ranks run far from their GPUs",
        "bind ranks to the CPUs near their GPUs, or print masks for srun",
    ),
    "logs": (
        "mldebug.cli._logs",
        "64 ranks wrote into one log",
        "sort it out: which tracebacks, on which ranks, which came first",
    ),
    "printflock": (
        "mldebug.cli._printflock",
        "64 ranks print at once, and nothing can be read",
        "run a script whose lines come out whole, with a prefix that names the rank",
    ),
    "tiny-model": (
        "mldebug.cli._tiny_model",
        "the real model is too big to try things on",
        "make a tiny model with the same architecture, and check it",
    ),
    "tiny-tokenizer": (
        "mldebug.cli._tiny_tokenizer",
        "its vocabulary is most of a tiny model",
        "make the same tokenizer with fewer tokens, and check it",
    ),
    "tiny-dataset": (
        "mldebug.cli._tiny_dataset",
        "the real data is too big to try things on, or too clean",
        "take a few rows of any dataset, odd ones too; `pack` and `unpack` records",
    ),
    "emulate": (
        "mldebug.cli._emulate",
        "it only fails on several nodes, and here is one machine",
        "run a command once for each of several emulated nodes",
    ),
    "troubleshoot": (
        "mldebug.cli._troubleshoot",
        "which of these is for me?",
        "ask three questions and propose the command",
    ),
    "demo": (
        "mldebug.cli.demo",
        "what does this look like?",
        "train a tiny T5 that overflows in fp16, and find the layer",
    ),
    "completion": (
        "mldebug.cli._completion",
        "too long to type",
        "print the script that completes commands and options in a shell",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 fine, 1 trouble found or a failed run, 2 wrong usage.

    Without `argv` this is the command of the process, and `sys.argv` is read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        status = _dispatch_or_say_what_is_missing(arguments, own_process=argv is None)
        if _is_open(sys.stdout):
            write("", sys.stdout)  # what is still in the buffer fails here, where it can be said, or not at all
    except MldebugError as exc:
        tell(f"mldebug: {exc}\n")
        if as_json:
            error = {"message": exc.message, "hint": exc.hint}
            with contextlib.suppress(MldebugError, BrokenPipeError):  # it may be stdout that failed
                write(json.dumps({"schema": 1, "ok": False, "error": error}) + "\n", sys.stdout)
        status = 2 if isinstance(exc, UsageError) else 1
    except KeyboardInterrupt:
        tell("mldebug: interrupted\n")
        status = 130
    except BrokenPipeError:  # the reader went away, as head does
        status = 1
    if argv is None:
        _fail_only_once()
    return status


def _is_open(stream: object) -> bool:
    """Whether there is a stream to flush: a script may have closed it, or put a simpler object in its place."""
    return callable(getattr(stream, "flush", None)) and not getattr(stream, "closed", False)


def _fail_only_once() -> None:
    """The interpreter flushes once more at its end: what could not be written must not fail there again, where it would
    be status 120."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if _is_open(stream):
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _dispatch_or_say_what_is_missing(arguments: list[str], own_process: bool) -> int:
    try:
        return _dispatch(arguments, own_process)
    except MldebugError:
        raise
    except Exception as exc:
        from mldebug.cli._missing import as_usage_error

        error = as_usage_error(exc)
        if error is None:
            raise
        raise error from exc


def _dispatch(arguments: list[str], own_process: bool) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        write(_help() + "\n", sys.stdout)
        return 0
    if arguments[0] in ("-V", "--version"):
        return _version(arguments[1:])
    name = arguments[0].replace("_", "-")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `mldebug {near[0]}`?" if near else "`mldebug --help` lists the commands"
        raise UsageError(f"no command named {arguments[0]!r}", hint)
    parsed = _parse(parser_of(name), arguments[1:])
    if isinstance(parsed, int):
        return parsed
    parsed.own_process = own_process
    status = importlib.import_module(COMMANDS[name][0]).run(parsed)
    return int(status)


def parser_of(name: str) -> Parser:
    """The parser of a command, with all of its options."""
    module_name, _trouble, summary = COMMANDS[name]
    module = importlib.import_module(module_name)
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: Parser = module.PARSER(prog=f"mldebug {name}", description=description, epilog=module.EPILOG)
    module.add_arguments(parser)
    return parser


def _parse(parser: Parser, arguments: list[str]) -> argparse.Namespace | int:
    """The parsed arguments, or the exit status where argparse has already answered (`--help`)."""
    try:
        parsed: argparse.Namespace = parser.parse_args(arguments)
        return parsed
    except SystemExit as exc:
        return int(exc.code or 0)


# A heading of the list, before the command that it stands above.
_HEADINGS = {
    "overflow": "The numbers are wrong",
    "spy": "It hangs, or it died",
    "memory": "It is slow, or out of memory",
    "dist-test": "Is the cluster in order?",
    "logs": "Nobody can read what the ranks print",
    "tiny-model": "Trying things out takes too long",
    "troubleshoot": "None of these, or all of them",
}


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: mldebug COMMAND [options]", "", "For a training run that goes wrong: what is the trouble?"]
    for name, (_module, trouble, summary) in COMMANDS.items():
        if name in _HEADINGS:
            lines += ["", _HEADINGS[name]]
        lines += [f"  {name:<{width}}{trouble}", f"      {summary}"]
    lines += [
        "",
        "`mldebug troubleshoot` asks three questions and proposes one of them.",
        "`mldebug COMMAND --help` lists the options of a command; `mldebug --version`",
        "says which version this is, and with --json what a bug report needs to say.",
        "Every command has --json, -o FILE, -q and --no-color. Exit status: 0 fine,",
        "1 trouble found, 2 wrong usage.",
    ]
    return "\n".join(lines)


def _version(rest: list[str]) -> int:
    if rest == ["--json"]:
        from mldebug.cli._environment import environment

        write(json.dumps(environment()) + "\n", sys.stdout)
    elif not rest:
        write(f"mldebug {__version__}\n", sys.stdout)
    else:
        raise UsageError(f"--version does not take {' '.join(rest)}", "`mldebug --version --json` is all there is")
    return 0
