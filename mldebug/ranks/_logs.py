"""logs(): a log that many ranks wrote into, sorted out."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from mldebug.core.errors import UsageError
from mldebug.ranks._logs_conclude import make_report
from mldebug.ranks._logs_fold import Entry, Window
from mldebug.ranks._logs_found import FoldedLine
from mldebug.ranks._logs_normal import names_of
from mldebug.ranks._logs_prefix import from_user
from mldebug.ranks._logs_read import find_logs
from mldebug.ranks._logs_reading import Reading
from mldebug.ranks._logs_report import LogsReport
from mldebug.ranks._logs_source import Sources
from mldebug.ranks._logs_split import Split


def logs(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    ranks: Iterable[int] | None = None,
    prefix: str | None = None,
    grep: str | None = None,
    split: str | os.PathLike[str] | None = None,
    lines: int = 40,
    on_line: Callable[[FoldedLine], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> LogsReport:
    """Sort out the logs of a job: whose line is it, which tracebacks are there, and which of them came first.

    `files` are paths, folders of logs, or "-" for stdin. Equal lines of several ranks become one with the set of ranks;
    the report keeps the last `lines` of them, and `on_line` is called with each. Ranks may be chosen (`ranks`), and
    lines by a regular expression (`grep`). `prefix` describes a prefix that is not recognised by itself, as a format
    (`"<{rank}> "`) or a regular expression; `split` is a folder for one file a rank. A file that cannot be read is a
    MldebugError. Memory stays bounded: logs of 10 GB and 1,024 ranks are read in one pass; `on_progress` is told now
    and then how many bytes that were.

        report = logs("slurm-4711.out")
        print(report.text()); report.tracebacks[0].ranks
    """
    names = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not names:
        raise UsageError("no log to read", "name files or folders, or - for stdin")
    try:
        wanted_text = re.compile(grep) if grep is not None else None
    except re.error as exc:
        raise UsageError(
            f"--grep {grep!r} is no regular expression: {exc}", "escape brackets with a backslash"
        ) from exc
    own = from_user(prefix) if prefix is not None else None
    reading = Reading(own, None if ranks is None else frozenset(ranks), Split(split) if split is not None else None)
    kept: deque[Entry] = deque(maxlen=lines)
    eager = on_line is not None or wanted_text is not None
    matched = False

    def out(entry: Entry) -> None:
        nonlocal matched
        text = entry.text
        half = len(text) // 2
        if (
            half > 5 and text[:half] == text[half:] and len(set(text[:half])) > 3
        ):  # no ruler; two writers met: the line break of the first came later
            reading.broken += 1
        if eager:
            if wanted_text is not None and not wanted_text.search(text.decode("utf-8", "replace")):
                return
            matched = True
            if on_line is not None:
                on_line(_folded(entry, reading.sources))
        kept.append(entry)

    reading.window = Window(out)
    reading.progress = on_progress
    reading.read(find_logs(names))
    if wanted_text is not None and not matched:
        reading.notes.append(f"no line matches {grep!r}")
    return make_report(reading, tuple(_folded(entry, reading.sources) for entry in kept))


def _folded(entry: Entry, sources: Sources) -> FoldedLine:
    members = sources.members(entry.mask)
    return FoldedLine(
        entry.text.decode("utf-8", "replace"),
        tuple(sorted({source.rank for source in members if source.rank is not None})),
        tuple(sorted({source.words for source in members if source.rank is None})),
        entry.times + 1,
        names_of(entry.differs),
        entry.line,
    )
