"""Rows from files that are read from the front: JSON lines, JSON, CSV and text, compressed or not."""

from __future__ import annotations

import csv
import io
import itertools
import json
import lzma
import tarfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from mldebug.tiny.dataset._rows import BadRow, Reader, Row, Taken

CHUNK = 1 << 20
LONGEST_VALUE = 64 << 20  # characters of one JSON value, before the file is taken for broken
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")
HEAD = 1000  # rows of a CSV file that its types are read from, as well as from the rows that are taken


def open_file(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where its name says that it is compressed."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        import gzip

        return cast(BinaryIO, gzip.open(path, "rb"))
    if suffix == ".bz2":
        import bz2

        return cast(BinaryIO, bz2.open(path, "rb"))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    if suffix in (".zst", ".zstd", ".lz4"):
        import pyarrow

        codec = "lz4" if suffix == ".lz4" else "zstd"
        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec), CHUNK))
    return open(path, "rb", buffering=CHUNK)


class FilesReader(Reader):
    """Rows of some files, one file after the other. What goes wrong inside a file ends that file only."""

    def __init__(self, files: Sequence[Path], features: Any = None) -> None:
        self.files, self.features = list(files), features

    def rows(self) -> Iterator[Row]:
        index = 0
        for path in self.files:
            try:
                for row in self.rows_of(path):
                    row.index = index
                    index += not row.gap
                    yield row
            except (OSError, EOFError, ValueError, csv.Error, zlib.error, lzma.LZMAError, tarfile.TarError) as exc:
                yield gap(path, f"it cannot be read to its end: {_reason(exc)}", index)

    @abstractmethod
    def rows_of(self, path: Path) -> Iterator[Row]:
        """The rows of one file, in order."""


def gap(path: Path, why: str, index: int = 0, line: int | None = None) -> Row:
    """A row in the place of a part that cannot be read."""
    where = path.name if line is None else f"{path.name}:{line}"

    def load() -> Mapping[str, Any]:
        raise BadRow(f"{where}: {why}")

    return Row(index, where, load, gap=True)


class TextReader(FilesReader):
    """A row for each line, as `load_dataset("text")` has them."""

    def rows_of(self, path: Path) -> Iterator[Row]:
        with open_file(path) as file:
            for number, line in enumerate(file, 1):
                yield self.row(f"{path.name}:{number}", line)

    def row(self, where: str, line: bytes) -> Row:
        """A line as a row."""
        return Row(0, where, _Text(where, line), len(line))


class _Text:
    def __init__(self, where: str, line: bytes) -> None:
        self.where, self.line = where, line

    def __call__(self) -> Mapping[str, Any]:
        return {"text": _decoded(self.line, self.where).rstrip("\r\n")}


class JsonReader(FilesReader):
    """A row for each object: one a line, or in one array, or one after the other."""

    def rows_of(self, path: Path) -> Iterator[Row]:
        with open_file(path) as file:
            first = file.readline()
            number = 1
            while first and not first.strip(b"\xef\xbb\xbf \t\r\n"):
                first = file.readline()
                number += 1
            first = first.removeprefix(b"\xef\xbb\xbf")
            if _is_line(first, file):
                yield self.row(f"{path.name}:{number}", first)
                for line in file:
                    number += 1
                    if line.strip():
                        yield self.row(f"{path.name}:{number}", line)
            else:
                yield from _values(path, first, number, file)

    def row(self, where: str, line: bytes) -> Row:
        """A line as a row."""
        return Row(0, where, _Json(where, line), len(line))


PLACES = 64  # that random rows come from, where files of lines are too large to be read to their ends


def spread_rows(reader: Reader, limit: int, rng: Any) -> Iterator[Row] | None:
    """The lines at random places of files that hold more than `limit` bytes: about so many bytes of them in all. The
    index of such a row is where it begins, in bytes over all files. None: the files are small enough, or have no lines
    that can be begun with anywhere."""
    if not isinstance(reader, (JsonReader, TextReader)) or any(path.suffix in COMPRESSED for path in reader.files):
        return None
    sizes = [path.stat().st_size for path in reader.files]
    if sum(sizes) <= limit or not all(_has_lines(reader, path) for path in reader.files):
        return None
    count = min(PLACES, sum(sizes))
    bounds = [sum(sizes) * place // count for place in range(count + 1)]  # one place in each part, so that none is bare
    places = [rng.randrange(low, high) for low, high in itertools.pairwise(bounds)]
    return _lines_at(reader, sizes, places, max(1, limit // PLACES))


def _has_lines(reader: Reader, path: Path) -> bool:
    if isinstance(reader, TextReader):
        return True
    with open_file(path) as file:
        return _is_line(file.readline(), file)


def _lines_at(reader: JsonReader | TextReader, sizes: list[int], places: list[int], most: int) -> Iterator[Row]:
    begin = 0
    for path, size in zip(reader.files, sizes, strict=True):
        here = [place - begin for place in places if begin <= place < begin + size]
        with open_file(path) as file:
            for place, after in zip(here, [*here[1:], size], strict=True):
                file.seek(place)
                at = place + len(file.readline() if place else b"")  # the rest of a line that began before
                end = min(after, at + most)
                while at < end and (line := file.readline()):
                    if line.strip() or isinstance(reader, TextReader):
                        row = reader.row(f"{path.name} at byte {at}", line)
                        row.index = begin + at
                        yield row
                    at += len(line)
        begin += size


def _is_line(first: bytes, file: BinaryIO) -> bool:
    """Whether the file has one object a line. A broken first line counts, where the second is whole."""
    if not first or first.lstrip()[:1] == b"[":
        return not first
    try:
        json.loads(first)
        return True
    except ValueError:
        if not file.seekable():
            return True
        place = file.tell()
        second = file.readline()
        file.seek(place)
        return second.lstrip()[:1] == b"{" and second.rstrip()[-1:] == b"}"


class _Json:
    def __init__(self, where: str, line: bytes) -> None:
        self.where, self.line = where, line

    def __call__(self) -> Mapping[str, Any]:
        text = _decoded(self.line, self.where).rstrip("\r\n")
        try:
            return _object(json.loads(text), self.where, "\\ud" in text.lower())
        except json.JSONDecodeError as exc:
            why = exc.msg[:1].lower() + exc.msg[1:].removesuffix(" at")
            raise BadRow(f"{self.where}: no JSON: {why} at column {exc.colno}") from None
        except (ValueError, RecursionError) as exc:
            raise BadRow(f"{self.where}: no JSON: {_reason(exc)}") from None


def _object(value: Any, where: str, surrogates: bool = True) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"{where}: the value is {type(value).__name__}, not an object with columns")
    if surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRow(f"{where}: half of a surrogate pair, which no text may hold") from None
    return value


def _values(path: Path, start: bytes, line: int, file: BinaryIO) -> Iterator[Row]:
    """The objects of a JSON array, or of a file with one object after the other, without reading it all at once.

    `start` is the first line that is not blank, number `line`, and `file` what comes after it.
    """
    text = io.TextIOWrapper(file, encoding="utf-8", errors="strict")
    decoder, buffer, place, number, size = json.JSONDecoder(), start.decode("utf-8"), 0, 0, CHUNK
    in_array = buffer.lstrip()[:1] == "["
    if in_array:
        place = buffer.index("[") + 1
    ended = False
    while True:
        while place < len(buffer) and buffer[place] in " \t\r\n,":
            place += 1
        if place < len(buffer) and in_array and buffer[place] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, place)
            if end == len(buffer) and not ended and not isinstance(value, (dict, list)):
                raise ValueError("a number may go on in the next part")
        except (ValueError, RecursionError) as exc:
            if ended or len(buffer) - place > LONGEST_VALUE:
                if buffer[place:].strip() or in_array:
                    where = line + buffer.count("\n", 0, getattr(exc, "pos", place))
                    why = str(getattr(exc, "msg", "a value that is very long"))
                    yield gap(path, f"broken JSON after {number:,} values: {why}", line=where)
                return
            more = text.read(size)
            size *= 2 if place == 0 else 1
            line += buffer.count("\n", 0, place)
            ended, buffer, place = not more, buffer[place:] + more, 0
            continue
        number += 1
        name = f"{path.name}[{number - 1}]"
        yield Row(0, name, _Known(value, name), end - place)
        place, size = end, CHUNK


class _Known:
    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where

    def __call__(self) -> Mapping[str, Any]:
        return _object(self.value, self.where)


class CsvReader(FilesReader):
    """Rows of CSV files whose first line has the names. Types are those that pandas finds, as datasets does."""

    def __init__(self, files: Sequence[Path], features: Any = None, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(files, features)
        self.options = dict(options or {})
        self.names: list[str] | None = None
        self.head: list[list[str]] = []

    def rows_of(self, path: Path) -> Iterator[Row]:
        tab = ".tsv" in [suffix.lower() for suffix in path.suffixes]
        separator = self.options.get("sep") or ("\t" if tab else ",")
        old = csv.field_size_limit(LONGEST_VALUE)
        try:
            with open_file(path) as file:
                text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
                lines = csv.reader(text, delimiter=separator)
                names = next(lines, None)
                if names is None:
                    return
                if any(map(_has_escapes, names)):
                    raise ValueError("its header is not UTF-8")
                names = _named(names)
                self.names = self.names or names
                if names != self.names:
                    raise ValueError(f"its columns are {', '.join(names)}, and those of the first file are others")
                line = lines.line_num + 1
                for cells in lines:
                    if cells:
                        where = f"{path.name}:{line}"
                        if len(self.head) < HEAD and len(cells) == len(names):
                            self.head.append(cells)
                        yield Row(0, where, _Cells(names, cells, where), sum(map(len, cells)) + len(cells))
                    line = lines.line_num + 1
        finally:
            csv.field_size_limit(old)

    def table(self, taken: list[Taken]) -> Any:
        import pandas
        import pyarrow

        self.head = []
        for _row in self.rows():
            if len(self.head) >= HEAD:
                break
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        names = self.names or []
        writer.writerow(names)
        head = [cells for cells in self.head if not any(_has_escapes(cell) for cell in cells)]
        writer.writerows(head)
        writer.writerows([row.values[name] for name in names] for row in taken)
        buffer.seek(0)
        frame = pandas.read_csv(buffer, skip_blank_lines=False)
        return pyarrow.Table.from_pandas(frame, preserve_index=False)[len(head) :]


def _named(names: list[str]) -> list[str]:
    """The header as pandas names the columns: no two alike, and none without a name."""
    found: list[str] = []
    for place, name in enumerate(names):
        name = name or f"Unnamed: {place}"
        again, number = name, 1
        while again in found:
            again, number = f"{name}.{number}", number + 1
        found.append(again)
    return found


class _Cells:
    def __init__(self, names: list[str], cells: list[str], where: str) -> None:
        self.names, self.cells, self.where = names, cells, where

    def __call__(self) -> Mapping[str, Any]:
        if len(self.cells) != len(self.names):
            raise BadRow(f"{self.where}: {len(self.cells)} fields where the header names {len(self.names)}")
        if any(map(_has_escapes, self.cells)):
            raise BadRow(f"{self.where}: the row is not UTF-8")
        return {name: cell or None for name, cell in zip(self.names, self.cells, strict=True)}


def _has_escapes(cell: str) -> bool:
    return not cell.isascii() and any("\ud800" <= sign <= "\udfff" for sign in cell)


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadRow(f"{where}: byte {exc.start} of the line is not UTF-8") from None


def _reason(exc: BaseException) -> str:
    return " ".join(str(getattr(exc, "strerror", None) or exc).split()) or type(exc).__name__
