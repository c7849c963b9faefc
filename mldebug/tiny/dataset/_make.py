"""tiny_dataset: a few rows of any dataset, as a small one that loads anywhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.core.extras import needs
from mldebug.tiny._calls import NUMBER, PATH, TEXT, checked_call
from mldebug.tiny._files import folder_beside, put, refuse
from mldebug.tiny.dataset._choose import Choice, chosen_splits, limits_for, no_rows, opened_source
from mldebug.tiny.dataset._report import SplitFacts, TinyDatasetReport
from mldebug.tiny.dataset._source import Opened
from mldebug.tiny.dataset._tar import TarReader
from mldebug.tiny.dataset._write import (
    RECORD,
    feature_text,
    folder_size,
    make_table,
    quiet,
    unify,
    write_card,
    write_parquet,
    write_record,
    write_samples,
)

__all__ = ["TinyDatasetReport", "tiny_dataset"]

FORMATS = ("auto", "parquet", "tar")


@checked_call(
    n=NUMBER,
    output=PATH,
    rows=TEXT,
    seed=NUMBER,
    by=TEXT,
    splits=(str, Sequence),
    config=TEXT,
    side=NUMBER,
    format=TEXT,
    max_rows=NUMBER,
    max_bytes=(*NUMBER, *TEXT),
    max_seconds=(Real,),
)
def tiny_dataset(
    source: Any,
    n: int,
    output: str | os.PathLike[str],
    *,
    rows: str = "first",
    seed: int = 0,
    by: str | None = None,
    splits: str | Sequence[str] | None = None,
    config: str | None = None,
    side: int = 32,
    format: str = "auto",
    fill_missing: bool = False,
    skip_bad: bool = False,
    max_rows: int | None = None,
    max_bytes: int | str | None = None,
    max_seconds: float | None = None,
    offline: bool | None = None,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TinyDatasetReport:
    """Write `n` rows of each split of `source` to the new folder `output`, which `load_dataset` loads, and report.

    `source` is a file (JSON lines, JSON, CSV, Parquet, Arrow, text, a webdataset tar; also compressed), a pattern such
    as "data/*.parquet", a folder of such files, an image or audio folder, what `save_to_disk` wrote, the id of a hub
    repository, which is streamed, or a Dataset, an IterableDataset or a dict of them. `rows` says which rows: the
    "first"; "random" ones; "stratified", random with every label (of the column `by`); or "cover", at least one of each
    kind of oddity: None and empty values, the shortest and the longest, each label, each image format and mode. To
    choose them at most `max_rows` rows (a million), `max_bytes` bytes (a gibibyte) and `max_seconds` seconds (30) of
    the source are looked at; the first rows are read for as long as it takes, unless a limit is given.

    The result is Parquet with the bytes of pictures and sounds in it, pictures at most `side` pixels long; tars stay
    tars (`format` "parquet" or "tar" chooses), with the members that each sample has, or with `fill_missing` an empty
    text or a JSON null for those it lacks. Features, splits and the card are kept. A row that cannot be read is an
    MldebugError, as is a source without rows; with `skip_bad` it is left out and named in the report, and another takes
    its place. The folder appears when it is complete; `force` replaces an earlier tiny dataset. Ctrl-C while rows are
    chosen ends the choosing: what was found is written, and `report.interrupted` is true. `progress` is called with a
    line now and then.

        report = tiny_dataset("data/train.jsonl", 100, "tiny", rows="cover")
        dataset = load_dataset("tiny")
    """
    begin = time.perf_counter()
    limits = limits_for(rows, max_rows, max_bytes, max_seconds, progress)
    choice = Choice(n, rows, seed, by, side, skip_bad, limits)
    if format not in FORMATS:
        raise UsageError(f"there is no format {format!r}", f"choose {', '.join(FORMATS)}")
    needs("a tiny dataset", "datasets", 5)
    target = Path(output)
    refuse(target, force, RECORD, "tiny dataset", source)
    with quiet(), folder_beside(target) as folder:
        opened = opened_source(source, config, offline)
        as_tar = _as_tar(format, opened)
        facts: dict[str, SplitFacts] = {}
        files: dict[str, tuple[Path, int, Any]] = {}
        tables: dict[str, tuple[Any, Any]] = {}
        notes = list(opened.notes)
        for name in chosen_splits(opened, splits):
            reader = opened.splits[name]
            picked = choice.pick(opened, name)
            if as_tar and picked.taken:
                path, features, more = write_samples(folder, name, picked.taken, fill_missing)
                files[name] = (path, len(picked.taken), features)
                picked.notes += more
            elif picked.taken:
                tables[name] = make_table(reader, picked.taken)
            facts[name] = choice.facts(picked, reader.count)
        if not files and not tables:
            raise no_rows(opened, facts)
        for name, (table, features) in (unify(tables) if tables else {}).items():
            files[name] = (write_parquet(folder, name, table, features), len(table), features)
        for name, (path, _rows, _features) in files.items():
            facts[name] = replace(facts[name], bytes=path.stat().st_size)
        notes += [f"split {name} has no rows, and is left out" for name in facts if name not in files]
        write_card(
            folder,
            opened.card or f"# {target.absolute().name}\n",
            opened.config,
            files,
            [f"Source: {opened.name}", *(f"{name}: {facts[name].line()}" for name in files), f"Seed: {seed}"],
        )
        record = {"source": opened.name, "kind": opened.kind, "n": n, "rows": rows, "by": by, "seed": seed}
        record |= {"side": side, "splits": {name: fact.to_dict() for name, fact in facts.items()}}
        write_record(folder, {"schema": 1, **record, "versions": _versions()})
        size = folder_size(folder)
        put(folder, target, force)
    return TinyDatasetReport(
        source=opened.name,
        kind=opened.kind,
        path=target,
        rows=rows,
        seed=seed,
        splits=facts,
        columns={name: feature_text(feature) for name, feature in next(iter(files.values()))[2].items()},
        bytes=size,
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
        interrupted=limits.stop is not None and limits.stop.asked,
    )


def _as_tar(format: str, opened: Opened) -> bool:
    is_tar = all(isinstance(reader, TarReader) for reader in opened.splits.values())
    if format == "tar" and not is_tar:
        raise UsageError(f"{opened.name} is no webdataset, and cannot be written as one", "leave --format out")
    return is_tar and format != "parquet"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from mldebug import __version__

    return {"mldebug": __version__, **{name: version(name) for name in ("datasets", "pyarrow", "pillow")}}
