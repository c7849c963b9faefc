"""`mldebug completion SHELL`: the script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.errors import MldebugError
from mldebug.core.report import write

PARSER = Parser
SHELLS = ("bash", "zsh", "fish", "tcsh")
EPILOG = """\
examples:
  eval "$(mldebug completion bash)"                      this shell only
  mldebug completion bash -o ~/.local/share/bash-completion/completions/mldebug
  mldebug completion zsh -o ~/.zfunc/_mldebug            a folder of $fpath
  mldebug completion fish -o ~/.config/fish/completions/mldebug.fish
  mldebug completion tcsh -o ~/.mldebug.tcsh; source ~/.mldebug.tcsh

Completes commands, options, their choices, and files. The script is fixed text:
pressing Tab starts no Python. Write it again after an upgrade."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    add_common(parser, output="write the script to FILE")


def run(args: argparse.Namespace) -> int:
    import json

    import shtab

    script = str(shtab.complete(whole_parser(), shell=args.shell)).rstrip("\n") + "\n"
    output = file_to_write("--output", args.output)
    if output is not None:
        try:
            Path(output).write_text(script, encoding="utf-8")
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            raise MldebugError(f"cannot write {output}: {reason}", "choose another -o") from exc
    if args.json:
        write(json.dumps({"schema": 1, "ok": True, "shell": args.shell, "script": script}) + "\n", sys.stdout)
    elif output is None:
        write(script, sys.stdout)
    return 0


def whole_parser() -> Parser:
    """All commands as subcommands of one parser. Nothing parses with it: each command has its own."""
    from mldebug.cli import COMMANDS, parser_of

    parser = Parser(prog="mldebug", description="For a training run that goes wrong.")
    parser.add_argument("--version", action="store_true", help="say which version this is")
    parser.add_argument("--json", action="store_true", help="with --version: what a bug report needs to say")
    commands = parser.add_subparsers(dest="command", parser_class=_given)  # type: ignore[call-overload]
    for name, (_module, _trouble, summary) in COMMANDS.items():
        commands.add_parser(name, parser=_with_files(parser_of(name)), help=summary)
    return parser


def _given(*, parser: Parser, **_: Any) -> Parser:
    """argparse makes the parser of a subcommand by a class; here it is there already."""
    return parser


def _with_files(parser: Parser) -> Parser:
    """Options whose value is a file or a folder say so to shtab, and a script is a file."""
    import shtab

    for action in parser._actions:
        kind = str(action.metavar).upper()
        if action.choices is not None or action.nargs == 0:
            continue
        if kind in ("DIR", "FOLDER"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif kind.startswith("FILE") or action.dest == "script":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
            if action.dest == "script":
                action.help = "the script and its arguments"
    return parser
