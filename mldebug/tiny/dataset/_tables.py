"""Rows from Parquet and Arrow: only the parts of the files that hold the rows are read."""

from __future__ import annotations

import bisect
import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mldebug.tiny._sizes import size_text
from mldebug.tiny.dataset._lines import gap, open_file
from mldebug.tiny.dataset._rows import READ_ERRORS, BadRow, Meter, Reader, Row, at

BATCH_BYTES = 8 << 20
MANY_FILES = 1000  # above this, random rows come from that many files


class Batch:
    """A batch whose rows are looked at: they become Python values all at once, when the first of them is needed."""

    def __init__(self, reader: TableReader, batch: Any) -> None:
        self.reader, self.batch = reader, batch
        self.lists: dict[str, list[Any]] | None = None

    def row(self, i: int, index: int, where: str, size: int) -> Row:
        return Row(index, where, lambda: self._values(i, where), size, lambda: self._table(i, where))

    def _values(self, i: int, where: str) -> Mapping[str, Any]:
        if self.lists is None:
            self.lists = {name: _values(self.batch.column(name)) for name in self.batch.schema.names}
        return {name: values[i] for name, values in self.lists.items()}

    def _table(self, i: int, where: str) -> Any:
        """Copied, so that it holds nothing of the batch that it came in."""
        try:
            return self.reader.cast(self.batch.take([i]))
        except (ValueError, TypeError, KeyError) as exc:
            raise BadRow(f"{where}: other types than the first rows have: {' '.join(str(exc).split())}") from None


def _values(column: Any) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # a time outside Python's, for example: good enough to look at as text
        try:
            return list(column.cast("string").to_pylist())
        except (ValueError, NotImplementedError):
            return ["?"] * len(column)


def features_of(schema: Any) -> Any:
    """The features that a schema holds; where they are corrupt, those of its types alone."""
    from datasets import Features

    try:
        return Features.from_arrow_schema(schema)
    except Exception:  # whatever a corrupt description leads to
        return Features.from_arrow_schema(schema.remove_metadata())


class TableReader(Reader):
    """Rows of batches. A subclass gives the batches of a part, such as a file."""

    def __init__(self, features: Any = None) -> None:
        self.features = features

    @abstractmethod
    def parts(self) -> Iterator[Any]:
        """What can be read by itself; one that is broken does not stop the others."""

    @abstractmethod
    def batches(self, part: Any, columns: list[str] | None = None) -> Iterator[Any]:
        """The rows of a part, some at a time, with these columns or all of them."""

    def name(self, part: Any) -> str:
        return Path(part).name

    def rows(self) -> Iterator[Row]:
        return self._rows(None)

    def column(self, name: str, bad: list[str]) -> Iterator[tuple[Row, Any]]:
        # A column's name may have dots of its own, and may be that of a field in a struct.
        known = self.features is None or name in self.features
        top = name if known else name.split(".", maxsplit=1)[0]
        if self.features is not None and top not in self.features:
            return
        for row in self._rows([top]):
            try:
                value = at(row.load(), name)
            except BadRow as exc:
                bad.append(str(exc))
            else:
                yield row, value

    def _rows(self, columns: list[str] | None) -> Iterator[Row]:
        index = 0
        for part in self.parts():
            number = 0
            try:
                for batch in self.batches(part, columns):
                    size = batch.nbytes // max(1, batch.num_rows)
                    held = Batch(self, batch)
                    for i in range(batch.num_rows):
                        yield held.row(i, index, f"{self.name(part)} row {number}", size)
                        index, number = index + 1, number + 1
            except READ_ERRORS as exc:
                yield gap(Path(self.name(part)), f"it cannot be read after row {number}: {' '.join(str(exc).split())}")
                missing = self.length(part)
                index += 0 if missing is None else missing - number

    def length(self, part: Any) -> int | None:
        """The rows of a part, where that is known without reading it."""
        return None

    def cast(self, table: Any) -> Any:
        """The types of the features, where they are known: shards may differ in details such as large strings."""
        import pyarrow

        if not isinstance(table, pyarrow.Table):
            table = pyarrow.Table.from_batches([table])
        if self.features is None or set(table.column_names) - set(self.features):
            return table
        schema = self.features.arrow_schema
        wanted = pyarrow.schema([schema.field(name) for name in table.column_names])
        if table.schema.equals(wanted):
            return table
        from datasets.table import table_cast

        return table_cast(table, wanted)


class ParquetReader(TableReader):
    """Parquet files. Pages are streamed, so that a row group of any size takes little memory."""

    def __init__(self, files: Sequence[Path], features: Any = None) -> None:
        super().__init__(features)
        self.files = list(files)
        self._counts: list[int] | None = None
        self._broken: list[Row] = []  # a gap for each file that has no rows to count
        if features is None:
            self.features = self._features()

    def _features(self) -> Any:
        for path in self.files:
            with contextlib.suppress(*READ_ERRORS), _parquet(path) as file:
                return features_of(file.schema_arrow)
        return None

    def parts(self) -> Iterator[Path]:
        return iter(self.files)

    def batches(self, part: Path, columns: list[str] | None = None) -> Iterator[Any]:
        with _parquet(part) as file:
            for group in range(file.num_row_groups):
                yield from _group_batches(file, group, columns)

    def length(self, part: Any) -> int | None:
        with contextlib.suppress(*READ_ERRORS), _parquet(part) as file:
            return int(file.metadata.num_rows)
        return None

    @property
    def count(self) -> int | None:  # type: ignore[override]
        if len(self.files) > MANY_FILES:
            return None
        return sum(self._file_counts())

    def _file_counts(self) -> list[int]:
        if self._counts is None:
            self._counts = []
            for path in self.files:
                try:
                    with _parquet(path) as file:
                        self._counts.append(int(file.metadata.num_rows))
                except READ_ERRORS as exc:
                    self._counts.append(0)
                    self._broken.append(gap(path, f"it cannot be read: {' '.join(str(exc).split())}"))
        return self._counts

    def sample(self, n: int, rng: Any, meter: Meter) -> tuple[list[int], str]:
        """Uniform over all rows where that reads few enough bytes, else over some row groups chosen at random."""
        groups = list(self._groups())  # (first row, rows, bytes)
        total = sum(count for _first, count, _bytes in groups)
        meter.rows, meter.complete = total, True
        chosen = sorted(rng.sample(range(total), min(n, total)))
        starts = [first for first, _count, _bytes in groups]
        touched = {bisect.bisect_right(starts, index) - 1 for index in chosen}
        limit = meter.limits.bytes
        if sum(groups[g][2] for g in touched) <= limit:
            return chosen, ""
        order = sorted(range(len(groups)), key=lambda g: rng.random() ** (1 / max(1, groups[g][1])), reverse=True)
        pool: list[range] = []
        read = 0
        for g in order:
            first, count, size = groups[g]
            if pool and read + size > limit:
                break
            fit = count if size <= limit else max(1, min(count, int(count * limit / size)))
            pool.append(range(first, first + fit))
            read += size
        rows = sum(map(len, pool))
        picks = rng.sample(range(rows), min(n, rows))
        chosen = sorted(_nth(pool, pick) for pick in picks)
        note = (
            f"random rows come from {rows:,} of {total:,} rows, in {len(pool)} of {len(groups)} row groups chosen at "
            f"random: to draw from all would read more than {size_text(limit)}"
        )
        return chosen, note

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        first = 0
        for path in self.files:
            with contextlib.suppress(*READ_ERRORS), _parquet(path) as file:
                for group in range(file.num_row_groups):
                    facts = file.metadata.row_group(group)
                    yield first, facts.num_rows, facts.total_byte_size
                    first += facts.num_rows

    def fetch(self, indices: Iterable[int]) -> Iterator[Row]:
        wanted = sorted(set(indices))
        begin = 0
        counts = self._file_counts()
        yield from self._broken
        for path, count in zip(self.files, counts, strict=True):
            here = [index - begin for index in wanted if begin <= index < begin + count]
            if here:
                try:
                    yield from self._fetch_file(path, here, begin)
                except READ_ERRORS as exc:
                    yield gap(path, f"it cannot be read: {' '.join(str(exc).split())}")
            begin += count

    def _fetch_file(self, path: Path, here: list[int], begin: int) -> Iterator[Row]:
        with _parquet(path) as file:
            start = 0
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                inside = [index - start for index in here if start <= index < start + facts.num_rows]
                size = facts.total_byte_size // max(1, facts.num_rows)
                for batch, offset in _with_offsets(_group_batches(file, group, None), inside):
                    for i in inside:
                        if offset <= i < offset + batch.num_rows:
                            at_file = start + i
                            yield Batch(self, batch).row(
                                i - offset, begin + at_file, f"{path.name} row {at_file}", size
                            )
                start += facts.num_rows


def _with_offsets(batches: Iterator[Any], inside: list[int]) -> Iterator[tuple[Any, int]]:
    """The batches up to the last row that is wanted."""
    offset = 0
    if not inside:
        return
    for batch in batches:
        yield batch, offset
        offset += batch.num_rows
        if offset > inside[-1]:
            return


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    if path.suffix.lower() == ".parquet" or not _is_compressed(path):
        with parquet.ParquetFile(path, memory_map=False, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file
    else:
        with unpacked(path) as plain, parquet.ParquetFile(plain, buffer_size=1 << 20, pre_buffer=False) as file:
            yield file


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A compressed file that has to be sought in, decompressed for the time being."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mldebug-") as folder:
        plain = Path(folder) / path.stem
        with open_file(path) as source, open(plain, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        yield plain


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")


def _group_batches(file: Any, group: int, columns: list[str] | None) -> Iterator[Any]:
    facts = file.metadata.row_group(group)
    per_row = facts.total_byte_size // max(1, facts.num_rows)
    size = max(1, min(1024, BATCH_BYTES // max(1, per_row)))
    return iter(file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False))


def _nth(pool: list[range], pick: int) -> int:
    for part in pool:
        if pick < len(part):
            return part[pick]
        pick -= len(part)
    raise IndexError(pick)


class ArrowReader(TableReader):
    """Arrow files, in the streaming form that datasets writes or in the file form. They are mapped, not read."""

    def __init__(self, files: Sequence[Path], features: Any = None) -> None:
        super().__init__(features)
        self.files = list(files)
        if features is None:
            self.features = self._features()

    def _features(self) -> Any:
        for path in self.files:
            with contextlib.suppress(*READ_ERRORS), _arrow(path) as (schema, _batches):
                return features_of(schema)
        return None

    def parts(self) -> Iterator[Path]:
        return iter(self.files)

    def batches(self, part: Path, columns: list[str] | None = None) -> Iterator[Any]:
        with _arrow(part) as (_schema, batches):
            for batch in batches:
                batch.validate(full=True)  # offsets that lead out of a corrupt file would end the process
                yield batch if columns is None else batch.select(columns)


@contextlib.contextmanager
def _arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    import pyarrow

    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(unpacked(path)) if _is_compressed(path) else path
        source = stack.enter_context(pyarrow.memory_map(str(plain)))
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            file = pyarrow.ipc.open_file(source)
            yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            stream = pyarrow.ipc.open_stream(source)
            yield stream.schema, iter(stream)
