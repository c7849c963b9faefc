"""The files of a recording: JSON lines, and whole tensors beside them as safetensors. Nothing in them is a pickle.

rank0.jsonl               a line for each call and tensor, written at once: they survive the end of the process
rank0-0.safetensors ...   whole tensors, by the number of their line; each file appears when it is complete
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from mldebug.core.errors import MldebugError, UsageError
from mldebug.numerics.runs._recording_check import check_lines

_PIECE = 16 << 20  # bytes of whole tensors that are kept until they are written
FORMAT = 1
_OURS = re.compile(r"rank(\d+)(\.jsonl|-(\d+)\.safetensors(\.part)?)")


class Writer:
    """Writes the recording of one rank, up to `max_bytes`."""

    def __init__(self, folder: str, rank: int, max_bytes: int, full_bytes: int) -> None:
        self._folder, self._rank = Path(folder), rank
        self._max, self._full = max_bytes, full_bytes
        self._written = self._kept = self._lines = self._pieces = 0
        self._waiting: dict[str, Tensor] = {}
        self.is_full = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                found = _OURS.fullmatch(path.name)
                if found and int(found[1]) == rank:
                    path.unlink()
            self._file = open(self._folder / f"rank{rank}.jsonl", "wb", buffering=0)  # noqa: SIM115
        except OSError as exc:
            reason = (exc.strerror or str(exc)).lower()
            raise MldebugError(f"cannot record to {folder}: {reason}", "give a folder that can be written") from exc

    def head(self, facts: dict[str, Any]) -> None:
        self.line({"kind": "run", "format": FORMAT, "rank": self._rank, **facts})

    @property
    def lines(self) -> int:
        """How many lines were written."""
        return self._lines

    @property
    def nbytes(self) -> int:
        """How large the files are, with the tensors that are yet to be written."""
        return self._written + self._kept

    def takes(self, nbytes: int) -> bool:
        """Whether a tensor of this size is kept whole."""
        return nbytes <= self._full and self._written + self._kept + nbytes <= self._max * 9 // 10

    def line(self, facts: dict[str, Any], whole: Tensor | None = None) -> int:
        """Append one line, and say its number."""
        number = self._lines
        if self.is_full:
            return number
        if whole is not None:
            facts = facts | {"whole": True}
            self._waiting[str(number)] = whole
            self._kept += whole.numel() * whole.element_size()
        text = (json.dumps({"n": number, **facts}, allow_nan=False) + "\n").encode()
        if self._written + self._kept + len(text) > self._max:
            self.is_full = True
            text = (json.dumps({"n": number, "kind": "full", "max_bytes": self._max}) + "\n").encode()
        if self._file.write(text) != len(text):
            raise OSError("the disk is full")
        self._lines += 1
        self._written += len(text)
        if self._kept >= _PIECE:
            self._flush()
        return number

    def close(self) -> None:
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if self._waiting:
            from safetensors.torch import save_file

            path = self._folder / f"rank{self._rank}-{self._pieces}.safetensors"
            part = path.with_name(path.name + ".part")
            try:
                save_file(self._waiting, part)
                os.replace(part, path)
            except BaseException:
                self._waiting = {}  # lines and samples are there all the same
                part.unlink(missing_ok=True)
                raise
            self._written, self._kept, self._pieces = self._written + self._kept, 0, self._pieces + 1
            self._waiting = {}


class RankFiles:
    """Reads the recording of one rank; whole tensors are loaded when they are asked for."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"rank{rank}.jsonl"
        self.rank, self.lines = rank, list(_lines(path))
        if not self.lines or self.lines[0].get("kind") != "run":
            raise UsageError(f"{path} is no recording", "mldebug compare --record DIR -- train.py")
        if self.lines[0].get("format") != FORMAT:
            raise UsageError(f"{folder} was written by another version of mldebug", "record the run again")
        check_lines(path, self.lines)
        self.head = self.lines[0]
        self.by_number = {line["n"]: line for line in self.lines}
        self._paths = [p for p in folder.iterdir() if (m := _OURS.fullmatch(p.name)) and int(m[1]) == rank and m[3]]
        self._homes: dict[str, Any] | None = None

    def whole(self, number: int) -> Tensor | None:
        """The tensor of this line; None where only a sample of it is there."""
        if self._homes is None:
            from safetensors import SafetensorError, safe_open

            self._homes = {}
            for path in self._paths:
                if path.suffix == ".safetensors":
                    try:
                        piece: Any = safe_open(path, "pt")
                    except (SafetensorError, OSError) as error:
                        hint = "record the run again, or remove this file: samples of its tensors are in the lines"
                        raise MldebugError(f"{path} cannot be read: {error}", hint) from error
                    self._homes.update(dict.fromkeys(piece.keys(), piece))
        home = self._homes.get(str(number))
        value: Tensor | None = None if home is None else home.get_tensor(str(number))
        return value if value is None or _fits(value, self.by_number[number]) else None


def _fits(value: Tensor, line: dict[str, Any]) -> bool:
    """Whether a whole tensor is the one of its line: files of another recording may lie in the folder."""
    shape = (line.get("shard") or {}).get("local", line["shape"])
    return list(value.shape) == [*shape, 2] if line.get("complex") else list(value.shape) == shape


def ranks_in(folder: Path) -> list[int]:
    """The ranks whose recordings are in `folder`."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", "give the folder that record_run or --record wrote to")
    found = (_OURS.fullmatch(path.name) for path in folder.iterdir())
    ranks = sorted({int(match[1]) for match in found if match and match[2] == ".jsonl"})
    if not ranks:
        raise UsageError(f"{folder} has no recording", "mldebug compare --record DIR -- train.py makes one")
    return ranks


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The last line may be cut off where the process was killed; MldebugError for another one that is no line."""
    with open(path, "rb") as file:
        for at, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and isinstance(line.get("n"), int) and isinstance(line.get("kind"), str):
                yield line
            elif at > 1 and file.readline():
                hint = "record the run again, or copy the folder again from where it was made"
                raise MldebugError(f"{path} is damaged: line {at} cannot be read", hint)
            else:
                return
