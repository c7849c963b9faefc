"""The lines of log files in pieces: gz and others, growing files, files of many ranks side by side."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mldebug.core.errors import MldebugError, UsageError

_PIECE = 256 << 10
_TURN = 8 << 20  # bytes of all files together before the first is read on
_LINE = 4 << 20  # bytes of a line without an end that are kept
_MAGIC = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))
_ENDINGS = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".gz", ".xz", ".bz2")
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


class LogFile:
    """One file, read piece by piece. What it has when it is read to its end is what counts: it may grow on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0  # bytes read, unpacked
        self.number = 0  # of the last line given out
        self.note = ""
        self._rest = b""
        self._stream: IO[bytes] | None = None
        self._at = 0
        self._opener: Any = None
        self.ended = False

    def head(self, size: int) -> bytes:
        """The beginning, to see what kind of file this is. For stdin it stays to be read."""
        if self.path == "-":
            self._stream = sys.stdin.buffer
            self._rest_of_head = (
                self._stream.read1(_PIECE) if hasattr(self._stream, "read1") else self._stream.read(_PIECE)
            )
            return self._rest_of_head
        try:
            with open(self.path, "rb") as stream:
                first = stream.read(8)
            self._opener = next((opener for magic, opener in _MAGIC if first.startswith(magic)), None)
            with (self._opener or open)(self.path, "rb") as stream:
                head: bytes = stream.read(size)
                if self._opener is None and (whole := os.fstat(stream.fileno()).st_size) > 4 * size:
                    for share in (0.3, 0.6, 0.9):  # a job's own lines may begin late
                        stream.seek(int(whole * share))
                        head += stream.read(size // 4).partition(b"\n")[2]
            return head
        except EOFError:
            return b""
        except (OSError, lzma.LZMAError) as exc:
            raise _cannot_read(self.path, exc) from exc

    _rest_of_head = b""

    def piece(self, size: int) -> bytes:
        """The next bytes, b"" at the end."""
        if self._rest_of_head:
            data, self._rest_of_head = self._rest_of_head, b""
            return data
        try:
            if self._stream is None:
                self._stream = (self._opener or open)(self.path, "rb")
                if self._at:
                    self._stream.seek(self._at)
            read1 = getattr(self._stream, "read1", None)
            data = read1(size) if self.path == "-" and read1 else self._stream.read(size)
        except EOFError:
            self.note = "the compressed file ends early: what is missing was not read"
            return b""
        except (OSError, lzma.LZMAError) as exc:
            if self._at == 0:
                raise _cannot_read(self.path, exc) from exc
            self.note = f"read up to byte {self._at}: {exc}"
            return b""
        self._at += len(data)
        return data

    def lines(self, size: int) -> bytes | None:
        """The next whole lines, without the last line break; None at the end, b"" where there is none yet."""
        data = self.piece(size)
        self.size += len(data)
        if not data:
            self.ended = True
            self.close()
            last, self._rest = self._rest, b""
            return cleaned(last) if last else None
        head, line_break, rest = data.rpartition(b"\n")
        if not line_break:
            self._hold(data)
            return b""
        data, self._rest = self._rest + head, b""
        self._hold(rest)
        return cleaned(data)

    @property
    def holds(self) -> bool:
        """Whether it has the beginning of a line, and the end is still to come."""
        return bool(self._rest)

    def _hold(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > _LINE:
            back = self._rest.rfind(b"\r", 0, -1)  # a progress bar: its last state is what counts
            if back > 0:
                self._rest = self._rest[back + 1 :]
            if len(self._rest) > _LINE:
                self._rest = self._rest[:_LINE]
                self.note = self.note or f"a line longer than {_LINE >> 20} MiB is cut"

    def close(self, keep_place: bool = False) -> None:
        if self._stream is not None and self.path != "-" and (not keep_place or self._opener is None):
            self._stream.close()
            self._stream = None


def in_turns(files: Sequence[LogFile]) -> Iterator[tuple[LogFile, bytes]]:
    """Lines of all files, a piece of each in turn, so that what their ranks said together stands together."""
    size = max(4096, min(_PIECE, _TURN // max(1, len(files))))
    most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128)  # files that are open at the same time
    left = list(files)
    while left:
        still = []
        for file in left:
            data = file.lines(size)
            if data is not None and (data or not file.holds):
                yield file, data
            if not file.ended:
                still.append(file)
                if len(left) > most:
                    file.close(keep_place=True)
        left = still


def cleaned(data: bytes) -> bytes:
    """Without colours, NULs and what a progress bar has written over."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    if b"\r" in data:
        data = b"\n".join(_last_state(line) if b"\r" in line else line for line in data.split(b"\n"))
    return data


def _last_state(line: bytes) -> bytes:
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


def looks_binary(head: bytes) -> bool:
    """Whether this is no log: a program, a checkpoint, an archive. Logs may have stray bytes, and runs of NULs."""
    if head.startswith((b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"\x80\x02", b"\x80\x04")):
        return True
    text = head.replace(b"\0", b"")
    odd = len(text.translate(None, bytes([*range(32, 256), 7, 8, 9, 10, 11, 12, 13, 27])))
    high = len(text.translate(None, bytes(range(128))))
    return bool(head) and (not text or odd > 0.05 * len(text) or (high > 0.3 * len(text) and not _is_utf8(text)))


def _is_utf8(text: bytes) -> bool:
    return len(text.decode("utf-8", "ignore").encode()) > 0.98 * len(text)


def find_logs(names: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files that are meant: folders stand for the logs in them, sorted so that numbers count as numbers."""
    paths: list[str] = []
    for name in map(str, names):
        if name != "-" and os.path.isdir(name):
            found = [str(path) for path in Path(name).rglob("*") if path.suffix in _ENDINGS and path.is_file()]
            if not found:
                raise UsageError(
                    f"no logs in the folder {name}", f"name the files themselves: {os.path.join(name, '*')}"
                )
            paths += sorted(found, key=_with_numbers)
        else:
            paths.append(name)
    if paths.count("-") > 1:
        raise UsageError("stdin (-) is named twice", "name it once")
    return list(dict.fromkeys(paths))


def _with_numbers(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def _cannot_read(path: str, exc: Exception) -> MldebugError:
    if isinstance(exc, FileNotFoundError):
        near = Path(path).parent
        ls = f"ls {shlex.quote(str(near))} shows what is there"
        hint = ls if near.is_dir() else f"there is no folder {near} either"
        return UsageError(f"cannot read {path}: no such file", hint)
    words = (getattr(exc, "strerror", None) or str(exc)).lower()
    return MldebugError(f"cannot read {path}: {words}", "look at it with `ls -l` and `file`")
