"""`mldebug logs FILE...`: sort out a log that many ranks wrote into."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from typing import IO, TYPE_CHECKING

from mldebug.cli._parser import Parser, add_common, file_to_write
from mldebug.core.errors import MldebugError
from mldebug.core.report import emit, write

if TYPE_CHECKING:
    from mldebug.ranks._logs_found import FoldedLine
    from mldebug.ranks._logs_report import LogsReport

PARSER = Parser
_ALL = -1
EPILOG = """\
examples:
  mldebug logs slurm-4711.out
  mldebug logs logs/                         one file for each rank
  mldebug logs job.log --rank 3 --lines all
  kubectl logs --prefix -l job=x | mldebug logs -
  mldebug logs job.log --prefix 'worker-{rank} | ' --split by-rank

Prints first which tracebacks there are, on which ranks, which came first and
which are consequences; then the last lines, those that ranks share folded into
one: `[0-6,8-63] step 12 loss 2.31`. Exit status: 1 where there is trouble."""

_RANK = "only these ranks: 3, or 0-7,12; repeatable"
_PREFIX = "what names the rank: a format such as '<{host}/{rank}> ', or a regular expression"
_LINES = "how many of the last folded lines to show, or `all` (default: 40)"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="logs, folders of logs, or - for stdin; .gz too")
    parser.add_argument("--rank", action="append", default=[], type=_ranks, metavar="R", help=_RANK)
    parser.add_argument("--prefix", metavar="P", help=_PREFIX)
    parser.add_argument("--grep", metavar="RE", help="of the lines show those that match, all of them")
    parser.add_argument("--lines", type=_lines, metavar="N", help=_LINES)
    parser.add_argument("--split", metavar="FOLDER", help="write one file for each rank into FOLDER")
    add_common(parser, output="write the JSON document to FILE")


def run(args: argparse.Namespace) -> int:
    from mldebug.ranks import logs

    output = file_to_write("--output", args.output)
    ranks = {rank for some in args.rank for rank in some} or None
    lines = args.lines if args.lines is not None else (_ALL if args.grep else 40)
    shown = not (args.json or args.quiet)
    progress = _Progress()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace") as spool:

        def keep(line: FoldedLine) -> None:
            from mldebug.ranks._logs_report import folded_text

            try:
                spool.write(folded_text(line) + "\n")
            except OSError as exc:
                hint = "set TMPDIR to a folder with room, or ask for fewer lines: --lines 1000"
                raise MldebugError(
                    f"cannot keep the folded lines in {tempfile.gettempdir()}: {exc.strerror}", hint
                ) from exc

        every = lines == _ALL and shown
        count = 100_000 if lines == _ALL else lines
        report = logs(args.files, ranks=ranks, prefix=args.prefix, grep=args.grep, split=args.split,
                      lines=0 if every else count, on_line=keep if every else None, on_progress=progress)  # fmt: skip
        progress.clear()
        emit(report, json=args.json, output=output, quiet=args.quiet, no_color=args.no_color)
        if every and spool.tell():
            spool.seek(0)
            write(
                f"\n{report.folded_lines:,} folded lines:\n" if not args.grep else "\nfolded lines that match:\n",
                sys.stdout,
            )
            _copy(spool)
    return _status(report)


def _copy(spool: IO[str]) -> None:
    try:
        shutil.copyfileobj(spool, sys.stdout)
        sys.stdout.flush()
    except UnicodeEncodeError:
        spool.seek(0)
        for line in spool:
            write(line, sys.stdout)


def _status(report: LogsReport) -> int:
    return 130 if report.interrupted else 0 if report.ok else 1


class _Progress:
    """How much has been read, on a terminal."""

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, size: int) -> None:
        if self._shown:
            write(f"\rmldebug: {size / 1e6:,.0f} MB read", sys.stderr)

    def clear(self) -> None:
        if self._shown:
            write("\r\x1b[K", sys.stderr)


def _ranks(text: str) -> set[int]:
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) - int(first) > 1_000_000:
            raise argparse.ArgumentTypeError(f"{text!r} is no rank or list of ranks such as 3 or 0-7,12")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _lines(text: str) -> int:
    if text == "all":
        return _ALL
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor `all`")
    return int(text)
