"""The process beside the ranks that hang_watchdog starts: looks at them, tells, ends them if it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.core.stacks import process_state
from mldebug.hang import _find as find
from mldebug.hang._inspect import save_evidence
from mldebug.hang._page import reclaim_files, start_ticks
from mldebug.hang._report import SpyReport
from mldebug.hang._tree import end_ranks
from mldebug.hang._watch_looks import Looks

_TICK = 1.0  # seconds between two questions whether the rank that started us is there


def main(config: str) -> None:
    """Look until the rank that started this process ends. `config` is JSON, written by hang_watchdog."""
    options = json.loads(config)
    find.from_inside = True
    with contextlib.suppress(OSError):
        os.nice(5)
    looks = Looks(options["timeout"])
    told = False
    next_look = time.monotonic() + looks.pause
    while _is_there(options):
        if time.monotonic() < next_look:
            time.sleep(min(_TICK, max(0.05, next_look - time.monotonic())))
            continue
        pids = find.ranks_beside(options["pid"], spawned=options["spawned"])
        report = looks.look(pids)
        if looks.last is not None and not looks.last.verdict.hung:
            told = False
        if report is not None and not told:
            told = True
            _tell(report, options)
            if options["kill"]:
                left = end_ranks(pids)
                _write(sys.stderr, f"\nmldebug: the ranks of this node were ended{_stay(left)}\n")
        next_look = time.monotonic() + looks.pause
    _tidy(options["lock"])


def _tidy(lock: str) -> None:
    """What a rank that was killed left. Its own end comes here too, unless it ends us first."""
    with contextlib.suppress(OSError):
        reclaim_files(os.path.dirname(lock))
        os.unlink(lock)  # we hold it


def _is_there(options: dict[str, Any]) -> bool:
    pid = options["pid"]
    return start_ticks(pid) == options["start"] and process_state(pid) not in ("", "Z", "X")


def _tell(report: SpyReport, options: dict[str, Any]) -> None:
    _write(sys.stderr, f"\nmldebug: nothing moved for {options['timeout']:g} s\n{report.text()}\n")
    if options["output"] is not None:
        try:
            save_evidence(report.evidence, options["output"])
        except MldebugError as exc:
            _write(sys.stderr, f"mldebug: {exc}\n")
    if options["report"]:
        _write(sys.stdout, json.dumps(report.evidence) + "\n")


def _stay(left: list[int]) -> str:
    return f", but for {', '.join(map(str, left))}" if left else ""


def _write(stream: Any, text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal or the pipe is gone
        stream.write(text)
        stream.flush()
