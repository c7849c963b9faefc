"""The result file: a JSON object a line, written as it is measured, so that it is valid whatever ends the run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.report import jsonable, write
from mldebug.perf.matmul._blocks import Block, Shape

_PACKAGE = Path(__file__).resolve().parents[2]


class ResultFile:
    """`append(record)` writes one line at once. A full disk is one warning, and never the end of the measuring.

    `path` is where it goes; by default a new file in the current folder, or in the one for temporary files where that
    cannot be written or is the installed package's own. `resume` goes on in a file that is there.
    """

    def __init__(self, path: str | os.PathLike[str] | None, label: str, resume: bool = False) -> None:
        self.path = Path(path) if path is not None else _default_path(label)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if resume else os.O_TRUNC)
        try:
            self._file = os.open(self.path, flags, 0o666)
            if resume:
                self._end_line()
        except OSError as exc:
            raise UsageError(
                f"cannot write {self.path}: {(exc.strerror or str(exc)).lower()}", "name another file with -o"
            ) from exc
        self._failed = False

    def append(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
        while line and not self._failed:
            try:
                line = line[os.write(self._file, line) :]
            except OSError as exc:
                self._failed = True
                with contextlib.suppress(Exception):
                    why = (exc.strerror or str(exc)).lower()
                    write(f"mldebug: {self.path} is incomplete: {why}. The run goes on\n", sys.stderr)

    def block(self, phase: str, block: Block, share: float | None) -> None:
        """One measured block, with its share of the reference where there was one beside it."""
        record: dict[str, Any] = {"kind": "block", "phase": phase, "shape": block.shape, "at": round(block.at, 4)}
        if block.error:
            record["error"] = block.error
        else:
            record |= {"tflops": round(block.tflops, 3), "seconds": round(block.seconds, 5), "calls": block.iterations}
        if share is not None:
            record["share"] = round(share, 5)
        self.append(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _end_line(self) -> None:
        """A run that was killed may have left half a line."""
        with self.path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    os.write(self._file, b"\n")


def read_results(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[Shape, list[float]]]:
    """The first line of a result file, and the shares of the reference by shape. Half a line at the end is left out.

    A file that is none of ours is a UsageError.

        start, shares = read_results("mamf-gpu0.jsonl")
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check the path") from exc
    start: dict[str, Any] = {}
    shares: dict[Shape, list[float]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut off when the run was killed
        if not isinstance(record, dict):
            continue
        if record.get("kind") == "start":
            start = start or record
        elif record.get("kind") == "block" and _is_of_the_race(record):
            shares.setdefault(tuple(record["shape"]), []).append(float(record["share"]))
    if start.get("tool") != "mamf":
        raise UsageError(f"{path} is no result file of mamf", "it is what -o of `mldebug mamf` names")
    return start, shares


def _is_of_the_race(record: Mapping[str, Any]) -> bool:
    """Whether a line has a share of one shape (m, n, k), which the products of a model, and damaged lines, have not."""
    shape, share = record.get("shape"), record.get("share")
    return (
        record.get("phase") != "model"
        and isinstance(shape, list)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
        and isinstance(share, (int, float))
        and math.isfinite(share)
        and share > 0
    )


def _default_path(label: str) -> Path:
    name = f"mamf-{socket.gethostname()}-{label}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    here = Path.cwd()
    if os.access(here, os.W_OK) and here.resolve() != _PACKAGE and _PACKAGE not in here.resolve().parents:
        return here / name
    return Path(tempfile.gettempdir()) / name
