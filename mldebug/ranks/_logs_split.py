"""`--split`: the lines of each rank in a file of its own."""

from __future__ import annotations

import os
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError
from mldebug.ranks._logs_source import Source

_HELD = 16 << 20  # bytes that wait to be written: each file is opened seldom, and 1,024 of them are not open at once


class Split:
    """Writes FOLDER/rank-3.log, with the prefix taken off, and FOLDER/no-rank.log for what no rank is known of."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UsageError(f"--split {folder}: the folder is not empty", "name one that is not there yet")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise _cannot_write(self.folder, exc) from exc
        self._held: dict[int, list[bytes]] = {}
        self._sources: dict[int, Source] = {}
        self._bytes = 0

    def add(self, source: Source, text: bytes) -> None:
        lines = self._held.get(source.index)
        if lines is None:
            lines = self._held[source.index] = []
            self._sources[source.index] = source
        lines.append(text)
        self._bytes += len(text) + 1
        if self._bytes > _HELD:
            self.write()

    def write(self) -> None:
        for index, lines in self._held.items():
            path = self.folder / f"part-{index}"
            try:
                with path.open("ab") as stream:
                    stream.write(b"\n".join(lines) + b"\n")
            except OSError as exc:
                raise _cannot_write(path, exc) from exc
        self._held.clear()
        self._bytes = 0

    def finish(self) -> int:
        """Name the files by what is known of the ranks at the end; returns how many files there are."""
        self.write()
        names: set[str] = set()
        for index, source in self._sources.items():
            name = f"rank-{source.rank}" if source.rank is not None else "".join(
                sign if sign.isalnum() or sign in "-_." else "-" for sign in source.words
            ) or "no-rank"  # fmt: skip
            part = self.folder / f"part-{index}"
            try:
                if name in names:  # two writers that proved to be one rank
                    with (self.folder / f"{name}.log").open("ab") as stream, part.open("rb") as more:
                        while block := more.read(1 << 20):
                            stream.write(block)
                    part.unlink()
                else:
                    part.rename(self.folder / f"{name}.log")
            except OSError as exc:
                raise _cannot_write(part, exc) from exc
            names.add(name)
        return len(names)


def _cannot_write(path: Path, exc: OSError) -> MldebugError:
    return MldebugError(
        f"cannot write {path}: {(exc.strerror or str(exc)).lower()}", "choose another folder for --split"
    )
