"""From the words of a command line to its exit status: the command is found, its errors are two lines."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import sys

from mldebug import __version__
from mldebug.cli import COMMANDS
from mldebug.cli._parser import Parser
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import tell, write


def run_command(arguments: list[str], own_process: bool) -> int:
    """Run one command and return its exit status: 0 fine, 1 trouble found or a failed run, 2 wrong usage.

    run_command(["doctor", "--json"], own_process=False)
    """
    as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
    try:
        status = _dispatch_or_say_what_is_missing(arguments, own_process)
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
    if own_process:
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
