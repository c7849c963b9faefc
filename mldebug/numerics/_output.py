"""The output file: JSON lines, each flushed, so that a killed run loses nothing it had written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from mldebug.core.errors import UsageError
from mldebug.core.report import jsonable
from mldebug.core.world import world
from mldebug.numerics._tell import warn

if TYPE_CHECKING:
    from mldebug.numerics._report import NumericsReport


class LinesFile:
    """Writes `{"kind": "step" | "frame" | "event", ...}` lines. A full disk is a warning, not the end of the run.

    Under several ranks each writes a file of its own: `frames.jsonl` becomes `frames.rank3.jsonl`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        here = world()
        target = Path(path)
        if here.world_size > 1:
            target = target.with_name(f"{target.stem}.rank{here.rank}{target.suffix}")
        self._path = target
        self._failed = False
        self._pid = os.getpid()
        self._file = self._opened("w")

    def open(self) -> None:
        """Go on after close()."""
        if self._file.closed:
            self._file = self._opened("a")

    def _opened(self, mode: Literal["w", "a"]) -> TextIO:
        try:
            return open(self._path, mode, encoding="utf-8")
        except (OSError, TypeError) as error:
            what = getattr(error, "strerror", None) or str(error)
            hint = "give a path in an existing folder"
            raise UsageError(f"cannot write {self._path}: {what.lower()}", hint) from error

    def write(self, kind: str, row: dict[str, Any]) -> None:
        if self._failed or self._file.closed or os.getpid() != self._pid:
            return  # a forked child does not write into its parent's file
        try:
            self._file.write(json.dumps(jsonable({"kind": kind, **row}), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            warn(
                f"mldebug: cannot write {self._path} any more: {(error.strerror or str(error)).lower()}\n"
                "hint: the run goes on; what was written before is kept"
            )

    def write_event(self, report: NumericsReport) -> None:
        for i, text in enumerate(report.frames):
            self.write("frame", {"index": i, "of": len(report.frames), "from": report.frames_from, "text": text})
        found = report.to_dict()
        found.pop("frames")
        self.write("event", found)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            self._failed = True
