"""`mldebug troubleshoot`: three questions, and the command that answers the trouble."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.cli._troubles import TROUBLES, WHERE, YOURS, Sign
from mldebug.core.errors import UsageError
from mldebug.core.report import Report, emit, write

PARSER = Parser
EPILOG = """\
examples:
  mldebug troubleshoot
  mldebug troubleshoot stuck
  mldebug troubleshoot stuck now slurm
  mldebug troubleshoot numbers nan node --json
  mldebug troubleshoot --list

Asks in a terminal what is wrong, what it looks like, and where it runs. Answers
that are given as arguments are not asked for; without a terminal all three are
needed. It runs nothing. With -q it prints the command alone."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("trouble", nargs="?", choices=tuple(TROUBLES), metavar="TROUBLE", help=", ".join(TROUBLES))
    parser.add_argument("sign", nargs="?", metavar="SIGN", help="what it looks like; --list has them")
    parser.add_argument("where", nargs="?", choices=tuple(WHERE), metavar="WHERE", help=", ".join(WHERE))
    parser.add_argument("--list", action="store_true", help="print all answers with their commands")
    add_common(parser, output="write the answer to FILE as JSON")


@dataclass(frozen=True)
class TroubleshootReport(Report):
    """The command for a trouble, why it is the one, and what to do when it finds nothing."""

    trouble: str
    sign: str
    where: str
    command: str
    reason: str
    otherwise: str
    page: str
    yours: tuple[str, ...]  # what stands in the command for something of the reader's

    def text(self, color: bool = False, width: int = 80) -> str:
        fill = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
        return "\n".join(
            [
                *(f"    {line}" for line in _in_lines(self.command, width - 4)),
                "",
                *([fill.fill(self._how_to_run()), ""] if self.yours else []),
                fill.fill(self.reason),
                "",
                fill.fill(f"If it finds nothing: {self.otherwise}"),
                f"More: {self.page}",
            ]
        )

    def _how_to_run(self) -> str:
        """Nobody else starts torchrun on the other nodes."""
        everywhere = "Run it on each node. " if "--nnodes" in self.command and "srun" not in self.command else ""
        return f"{everywhere}Put your own in the place of: {', '.join(self.yours)}."


@dataclass(frozen=True)
class TroubleshootList(Report):
    """All answers, with their commands."""

    answers: tuple[TroubleshootReport, ...]

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = []
        for key, trouble in TROUBLES.items():
            lines += [f"{key}: {trouble.words}"]
            for name, sign in trouble.signs.items():
                lines += [f"  {key} {name}: {sign.words}"]
                lines += [f"      {line}" for line in _in_lines(sign.line("node"), width - 6)]
        lines += ["", "Then one of", *(f"  {key}: {words}" for key, words in WHERE.items())]
        return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    output = file_to_write("--output", args.output)
    if args.list:
        everything = TroubleshootList(
            tuple(
                _report(trouble, sign, where)
                for trouble, one in TROUBLES.items()
                for sign in one.signs
                for where in WHERE
            )
        )
        emit(everything, json=args.json, output=output, no_color=args.no_color)
        return 0
    given = (args.trouble, args.sign, args.where)
    if args.trouble is not None and args.sign is not None:
        _one_of(args.sign, TROUBLES[args.trouble].signs, f"a sign of {args.trouble!r}")
    try:
        trouble = args.trouble or _ask("What is wrong?", {key: one.words for key, one in TROUBLES.items()}, given)
        signs = TROUBLES[trouble].signs
        sign = args.sign or _ask("What does it look like?", {key: one.words for key, one in signs.items()}, given)
        where = args.where or _ask("Where does it run?", WHERE, given)
    except _Left:
        return 0
    report = _report(trouble, sign, where)
    if args.quiet and not args.json:
        write(f"{report.command}\n", sys.stdout)
        emit(report, output=output, quiet=True)
    else:
        emit(report, json=args.json, output=output, no_color=args.no_color)
    return 0


def _report(trouble: str, sign: str, where: str) -> TroubleshootReport:
    found: Sign = TROUBLES[trouble].signs[sign]
    command = found.line(where)
    yours = tuple(one for one in YOURS if re.search(rf"(?<!\S){re.escape(one)}(?!\S)", command))
    page = f"docs/troubles/{found.page}.md"
    return TroubleshootReport(trouble, sign, where, command, found.reason, found.otherwise, page, yours)


class _Left(Exception):
    """The reader wants no answer."""


def _ask(question: str, answers: Mapping[str, str], given: tuple[str | None, ...]) -> str:
    """The key that was chosen by its number or its name. The questions go to stderr, as no data."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"nobody can be asked {question!r}: stdin is no terminal",
            f"give the answers: `mldebug troubleshoot {_usage(answers, given)}`; "
            "`mldebug troubleshoot --list` has all of them",
        )
    width = max(map(len, answers))
    lines = [f"{number}  {key:<{width}}  {words}" for number, (key, words) in enumerate(answers.items(), 1)]
    write("\n".join([question, *(f"  {line}" for line in lines)]) + "\n", sys.stderr)
    while True:
        write(f"1-{len(answers)}, or q to leave: ", sys.stderr)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            write("\n", sys.stderr)
            raise
        answer = line.strip().lower()
        if not line or answer in ("q", "quit", "exit"):  # the end of the input is an answer too
            write("\n" if not line else "", sys.stderr)
            raise _Left
        if answer.isdecimal() and 1 <= int(answer) <= len(answers):
            answer = list(answers)[int(answer) - 1]
        if answer in answers:
            write("\n", sys.stderr)
            return answer
        if answer:
            write(f"there is no answer {answer[:40]!r}\n", sys.stderr)


def _usage(answers: Mapping[str, str], given: tuple[str | None, ...]) -> str:
    """The arguments that are given, then the choices of the first that is not, then the names of the rest."""
    known = [one for one in given if one is not None]
    return " ".join([*known, "|".join(answers), *("SIGN", "WHERE")[len(known) :]])


def _one_of(answer: str, known: Mapping[str, object], what: str) -> None:
    if answer not in known:
        raise UsageError(f"{answer!r} is not {what}", f"one of {', '.join(known)}")


def _in_lines(command: str, width: int) -> list[str]:
    """A command in lines that can be pasted as they are."""
    lines = textwrap.wrap(command, width - 2, break_long_words=False, break_on_hyphens=False)
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
