"""unpack and pack: the records of a dataset as folders of files to edit, and a dataset made of such folders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.report import Report
from mldebug.tiny._calls import NUMBER, PATH, TEXT, checked_call
from mldebug.tiny._files import folder_beside, path_of, put, refuse
from mldebug.tiny._report import layout
from mldebug.tiny._sizes import size_text
from mldebug.tiny.dataset._choose import Choice, chosen_splits, limits_for, no_rows, opened_source
from mldebug.tiny.dataset._pack_files import FEATURES, read_record, record_features, write_features, write_files
from mldebug.tiny.dataset._pack_unique import Distinct
from mldebug.tiny.dataset._write import RECORD, feature_text, folder_size, make_table, quiet, write_card, write_record

__all__ = ["PackReport", "UnpackReport", "pack", "unpack"]

BATCH = 1000


@dataclass(frozen=True)
class UnpackReport(Report):
    """Records as folders, from unpack().

        report = unpack("data.jsonl", "records", 10); print(report.path, report.records)

    - `path`: the folder that was made; `records` folders are in it, with `files` files in all
    - `columns`: names of the columns of the source
    - `skipped`: a text for each row of the source that could not be used; `notes`: what else to know
    - `seconds`: how long it took
    """

    source: str
    path: Path
    records: int
    files: int
    columns: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    def text(self, color: bool = False, width: int = 80) -> str:
        lines = [("source", self.source), ("records", f"{self.path}: {self.records} folders, {self.files} files")]
        lines.append(("columns", ", ".join(self.columns)))
        lines += [("skipped", text) for text in self.skipped[:5]]
        lines += [("note", text) for text in self.notes]
        lines.append(("time", f"{self.seconds:.1f} s"))
        return layout(lines, width)


@dataclass(frozen=True)
class PackReport(Report):
    """A dataset made of folders, from pack().

        report = pack("records", "synthetic", 10_000); print(report.rows, report.bytes)

    - `path`: the folder of the dataset, of `bytes` bytes
    - `rows`: how many it has; `records`: of how many folders they were made; `unique`: no two rows are equal
    - `columns`: name and kind of each column
    - `seconds`: how long it took
    """

    source: str
    path: Path
    rows: int
    records: int
    unique: bool
    columns: dict[str, str]
    bytes: int
    seconds: float

    def text(self, color: bool = False, width: int = 80) -> str:
        made = "each made distinct" if self.unique else "repeated" if self.rows > self.records else "as they are"
        lines = [
            ("source", f"{self.source}: {self.records} records"),
            ("dataset", f"{self.path}, {size_text(self.bytes)}"),
            ("rows", f"{self.rows:,}, {made}"),
            ("columns", ", ".join(f"{name} {kind}" for name, kind in self.columns.items())),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return layout(lines, width)


@checked_call(output=PATH, n=NUMBER, rows=TEXT, seed=NUMBER, by=TEXT, split=TEXT, config=TEXT, side=NUMBER)
def unpack(
    source: Any,
    output: str | os.PathLike[str],
    n: int = 10,
    *,
    rows: str = "cover",
    seed: int = 0,
    by: str | None = None,
    split: str | None = None,
    config: str | None = None,
    side: int = 32,
    skip_bad: bool = False,
    offline: bool | None = None,
    force: bool = False,
) -> UnpackReport:
    """Write `n` records of `source` (what tiny_dataset takes) to the new folder `output`, each as a folder of files.

    A text is `text.txt`, a picture `image.jpg` in its own format, an empty slot `text.null`; a list of texts or
    pictures is `texts_00.txt`, `texts_01.null`, ...; everything else is JSON. `features.json` has the types, and may be
    deleted: `pack` then goes by the names of the files. A row that cannot be read is an MldebugError; with `skip_bad`
    it is left out and named.

        unpack("tiny", "records", 5)
    """
    begin = time.perf_counter()
    choice = Choice(n, rows, seed, by, side, skip_bad, limits_for(rows))
    target = Path(output)
    refuse(target, force, FEATURES, "folder of records", source)
    with quiet(), folder_beside(target) as folder:
        opened = opened_source(source, config, offline)
        name = chosen_splits(opened, split)[0]
        reader, picked = opened.splits[name], choice.pick(opened, name)
        if not picked.taken:
            raise no_rows(opened, {name: choice.facts(picked, reader.count)})
        table, features = make_table(reader, picked.taken)
        write_features(folder, features)
        values = table.to_pylist()
        width = max(2, len(str(len(values) - 1)))
        for number, row in enumerate(values):
            record = folder / f"{number:0{width}d}"
            record.mkdir()
            write_files(record, row, features)
        files = sum(path.is_file() for path in folder.rglob("*")) - 1
        put(folder, target, force)
    return UnpackReport(
        source=opened.name,
        path=target,
        records=len(values),
        files=files,
        columns=tuple(features),
        skipped=tuple(dict.fromkeys(picked.skipped)),
        notes=tuple(picked.notes),
        seconds=time.perf_counter() - begin,
    )


@checked_call(source=PATH, output=PATH, n=NUMBER, split=TEXT)
def pack(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    n: int | None = None,
    *,
    repeat: bool = True,
    unique: bool = False,
    split: str = "train",
    force: bool = False,
) -> PackReport:
    """Make a dataset of `n` rows, in the new folder `output`, of the record folders in `source`.

    Records are taken in the order of their names, and again from the first when all were taken (`repeat=False` refuses
    to). With `unique` no two rows are equal: from the second round on a number is added to the texts of a record, or
    drawn into its first picture. Without `n` there is a row for each record. `split` is the name of the split that is
    written; `force` replaces a folder `output` that exists.

    UsageError for `n` below 1, a folder that is not there, an `output` that exists, or fewer records than rows with
    `repeat=False`; MldebugError for a folder without records, records whose columns differ, or a full disk. `output`
    then is as it was.

        pack("records", "synthetic", 10_000, unique=True)
    """
    begin = time.perf_counter()
    if n is not None and n < 1:
        raise UsageError(f"a dataset of {n} rows", "-n takes a number of 1 or more")
    target, root = Path(output), Path(source)
    refuse(target, force, RECORD, "tiny dataset", source)
    records = _records(root)
    count = len(records) if n is None else n
    if count > len(records) and not (repeat or unique):
        raise UsageError(f"{count} rows of {len(records)} records", "let records repeat, or make them unique")
    with quiet(), folder_beside(target) as folder:
        features = record_features(root, records)
        templates = [read_record(record, features) for record in records]
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir()
        _write_rows(path, _rows(templates, root, count, features, unique), features)
        write_card(
            folder,
            f"# {target.absolute().name}\n",
            "default",
            {split: (path, count, features)},
            [
                f"{count:,} rows of {len(records)} records, {'no two of them equal' if unique else 'in order'}",
            ],
        )
        write_record(folder, {"schema": 1, "source": str(source), "kind": "records", "n": count, "unique": unique})
        size = folder_size(folder)
        put(folder, target, force)
    return PackReport(
        source=str(source),
        path=target,
        rows=count,
        records=len(records),
        unique=unique,
        columns={name: feature_text(feature) for name, feature in features.items()},
        bytes=size,
        seconds=time.perf_counter() - begin,
    )


def _records(root: Path) -> list[Path]:
    if path_of(root) is None or not root.is_dir():
        raise UsageError(f"cannot read {root}: no such folder", "give the folder that unpack wrote")
    records = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not records:
        raise MldebugError(f"{root} has no record folders", "each record is a folder of files such as 00/text.txt")
    return records


def _rows(
    templates: list[dict[str, Any]], root: Path, count: int, features: Any, unique: bool
) -> Iterator[dict[str, Any]]:
    if not unique:
        for number in range(count):
            yield templates[number % len(templates)]
        return
    distinct, usable, made, place = Distinct(features), list(templates), 0, 0
    while made < count:
        row = distinct.row(usable[place], made)
        if row is not None:
            yield row
            made, place = made + 1, place + 1
        else:  # it is there once, and has nothing that can be changed
            del usable[place]
        if not usable:
            raise MldebugError(
                f"no record in {root} can be made distinct: {made} rows, and no more",
                "a record needs a text, a number, or a picture of a few pixels at least",
            )
        place %= len(usable)


def _write_rows(path: Path, rows: Iterator[dict[str, Any]], features: Any) -> None:
    """A thousand rows at a time, so that any length takes little memory."""
    import itertools

    import pyarrow.parquet as parquet

    from mldebug.tiny.dataset._pack_files import records_table

    with parquet.ParquetWriter(path, features.arrow_schema) as writer:
        while batch := list(itertools.islice(rows, BATCH)):
            writer.write_table(records_table(batch, features))
