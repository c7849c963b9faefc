"""The files of a run: JSONL, JSON, CSV and Markdown, whole at any time; a PNG at the end."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.cluster.collectives._plot import drawing, picture
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import jsonable

if TYPE_CHECKING:
    from mldebug.cluster.collectives._report import CommsReport

KINDS = (".jsonl", ".json", ".csv", ".md", ".png")
_COLUMNS = ("collective", "dtype", "op", "root", "bytes", "count")
_CELL = ("mode", "calls", "iters", "us", "algbw", "busbw", "wrong", "min_us", "max_us")


class Saver:
    """`row()` after each measurement, `end()` once. A file that cannot be made is an error at the start; of one that
    takes no more the run hears at its end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.kind = Path(path).suffix.lower() if path else ""
        self.trouble: OSError | None = None
        self.rows = 0
        if path and self.kind not in KINDS:
            raise UsageError(f"{path} is no kind of file that is known here", f"one that ends in {', '.join(KINDS)}")

    def __enter__(self) -> Saver:
        if self.kind == ".png":
            drawing()  # without matplotlib nothing need be measured
        if self.path:
            # That it can be made shows itself now. What was there is another run's, and goes with the first row.
            self._write("", keep=self.kind != ".jsonl")
        if self.trouble is not None:
            raise _cannot(self.path, self.trouble)
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def row(self, evidence: dict[str, Any]) -> None:
        if self.kind == ".jsonl":
            for row in evidence["rows"][self.rows :]:
                self._append({"row": row})
            self.rows = len(evidence["rows"])
        elif self.kind in (".json", ".csv", ".md"):
            self._write(text_of(evidence, self.kind))

    def end(self, report: CommsReport) -> None:
        if not self.path:
            return
        if self.kind == ".jsonl":
            self.row(report.evidence)
            self._append({"end": {key: value for key, value in report.to_dict().items() if key != "rows"}})
        elif self.kind == ".png":
            self._write(picture(report.evidence))
        else:
            self._write(text_of(report.evidence, self.kind, report))
        if self.trouble is not None:
            raise _cannot(self.path, self.trouble)

    def _append(self, value: dict[str, Any]) -> None:
        if self.trouble is not None:
            return  # a line after half a line would be lost with it
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(jsonable(value), allow_nan=False) + "\n")
        except OSError as exc:
            self.trouble = exc

    def _write(self, content: str | bytes, keep: bool = False) -> None:
        """Beside it, and renamed: at any time there is a whole file. With `keep` it is not."""
        beside = f"{self.path}.{os.getpid()}.tmp"
        try:
            with open(beside, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
            os.unlink(beside) if keep else os.replace(beside, self.path)
            self.trouble = None  # what failed before is in it, too
        except OSError as exc:
            self.trouble = exc
            with contextlib.suppress(OSError):
                os.unlink(beside)


def text_of(evidence: dict[str, Any], kind: str, report: CommsReport | None = None) -> str:
    """The evidence as .json, .csv or .md."""
    if kind == ".json":
        return (report.json() if report is not None else json.dumps(jsonable(evidence), allow_nan=False)) + "\n"
    return csv_of(evidence) if kind == ".csv" else markdown_of(evidence)


def csv_of(evidence: dict[str, Any]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*_COLUMNS, "place", *_CELL])
    for row in evidence["rows"]:
        for place in ("out_of_place", "in_place"):
            if place in row:
                cells = [row[place].get(name) for name in _CELL]
                values = [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells]
                writer.writerow([*(row[name] for name in _COLUMNS), place, *values])
    return buffer.getvalue()


def markdown_of(evidence: dict[str, Any]) -> str:
    from mldebug.cluster.collectives._table import size_text

    lines = [
        "| collective | dtype | size | place | mode | us | algbw | busbw | #wrong |",
        "|---|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for row in evidence["rows"]:
        for place in ("out_of_place", "in_place"):
            if place in row:
                cell = row[place]
                wrong = "N/A" if cell["wrong"] is None else cell["wrong"]
                lines.append(
                    f"| {row['collective']} | {row['dtype']} | {size_text(row['bytes'])} | {place.replace('_', ' ')} | "
                    f"{cell['mode']} | {cell['us']:.2f} | {cell['algbw']:.2f} | {cell['busbw']:.2f} | {wrong} |"
                )
    return "\n".join(lines) + "\n"


def load(path: str) -> dict[str, Any]:
    """The evidence in a .json or .jsonl file, also of a run that was killed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = (exc.strerror or str(exc)).lower() if isinstance(exc, OSError) else "it is no text"
        raise UsageError(f"cannot read {path}: {reason}", "give the path that -o was given") from exc
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        if Path(path).suffix.lower() == ".jsonl":
            return _of_lines(text)
        found = json.loads(text)
        if isinstance(found["rows"], list) and isinstance(found["world"], int):
            return dict(found)
    raise UsageError(f"{path} is not what `mldebug comms -o` writes", "give a .json or .jsonl file of a run")


def _of_lines(text: str) -> dict[str, Any]:
    from mldebug.cluster.collectives._options import Options
    from mldebug.cluster.collectives._run import new_evidence

    lines = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # the last one of a run that was killed, or of a full disk
            lines.append(json.loads(line))
    if not all(isinstance(line, dict) for line in lines) or not any(line.keys() & {"row", "end"} for line in lines):
        raise ValueError("no line of a run")
    evidence = new_evidence(Options())
    for line in lines:
        evidence.update(line.get("end", {}))
    evidence["rows"] = [line["row"] for line in lines if "row" in line]
    if not evidence["ended"]:
        evidence.update(ended="killed", why="the file has no end")
    return evidence


def _cannot(path: str, exc: OSError) -> MldebugError:
    return MldebugError(f"cannot write {path}: {(exc.strerror or str(exc)).lower()}", "choose another -o")
