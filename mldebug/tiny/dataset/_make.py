"""tiny_dataset: a few rows of any dataset, as a small one that loads anywhere."""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._calls import NUMBER, PATH, TEXT, checked_call
from mldebug.tiny._files import folder_beside, put
from mldebug.tiny.dataset._cover import pick_cover
from mldebug.tiny.dataset._media import Shrinker
from mldebug.tiny.dataset._pick import Picked, pick_first, pick_random, pick_stratified
from mldebug.tiny.dataset._report import SplitFacts, TinyDatasetReport
from mldebug.tiny.dataset._rows import Limits, Reader, Row, Stop, Taken
from mldebug.tiny.dataset._source import Opened, open_source
from mldebug.tiny.dataset._tar import TarReader, decoded
from mldebug.tiny.dataset._write import (
    RECORD,
    check_sample,
    folder_size,
    make_table,
    samples_as_rows,
    unify,
    write_card,
    write_parquet,
    write_record,
    write_samples,
)

__all__ = ["TinyDatasetReport", "tiny_dataset"]

WAYS = ("first", "random", "stratified", "cover")


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
    max_bytes=NUMBER,
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
    max_bytes: int | None = None,
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
    _check(n, rows, side, format, max_rows, max_bytes, max_seconds)
    target = Path(output)
    refuse(target, force)
    limits = _limits(rows, max_rows, max_bytes, max_seconds, progress)
    with quiet(), folder_beside(target) as folder:
        opened = _open(source, config, offline)
        as_tar = _as_tar(format, opened)
        facts: dict[str, SplitFacts] = {}
        files: dict[str, tuple[Path, int, Any]] = {}
        tables: dict[str, tuple[Any, Any]] = {}
        notes = list(opened.notes)
        for name in _chosen(opened, [splits] if isinstance(splits, str) else splits):
            reader = opened.splits[name]
            shrinker = Shrinker(reader.features, side, opened.root)
            picked = _pick(reader, n, rows, limits, f"{seed} {name}", by, shrinker, skip_bad)
            picked.notes += [f"{text} ({times} times)" for text, times in shrinker.notes.items()]
            if as_tar and picked.taken:
                path, features, more = write_samples(folder, name, picked.taken, fill_missing)
                files[name] = (path, len(picked.taken), features)
                picked.notes += more
            elif picked.taken:
                tables[name] = _table(reader, picked.taken)
            facts[name] = _facts(picked, n, rows, reader.count)
        if not files and not tables:
            raise _no_rows(opened, facts)
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
        columns={name: _type_text(feature) for name, feature in next(iter(files.values()))[2].items()},
        bytes=size,
        notes=tuple(notes),
        seconds=time.perf_counter() - begin,
        interrupted=limits.stop is not None and limits.stop.asked,
    )


def _open(source: Any, config: str | None, offline: bool | None) -> Opened:
    try:
        return open_source(source, config=config, offline=offline)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise MldebugError(f"cannot read {source}: {reason}", "check its permissions") from exc


def _pick(
    reader: Reader, n: int, rows: str, limits: Limits, seed: str, by: str | None, shrinker: Shrinker, skip_bad: bool
) -> Picked:
    with limits.stop or contextlib.nullcontext():
        picked = _picked(reader, n, rows, limits, random.Random(seed), by, shrinker)
    if limits.stop is not None and limits.stop.asked and not picked.taken:
        raise KeyboardInterrupt
    if picked.skipped and picked.taken and not skip_bad:  # where none is left, the error is another one
        hint = "mend the source, or give --skip-bad (skip_bad=True): bad rows are then named, and others taken"
        raise MldebugError(f"a row cannot be read: {_first_of(picked.skipped)}", hint)
    return picked


def _picked(
    reader: Reader, n: int, rows: str, limits: Limits, rng: random.Random, by: str | None, shrinker: Shrinker
) -> Picked:
    take = _take_sample(shrinker) if isinstance(reader, TarReader) else shrinker.take
    if rows == "first":
        return pick_first(reader, n, take, limits)
    if rows == "random":
        return pick_random(reader, n, take, limits, rng)
    if rows == "stratified":
        return pick_stratified(reader, n, take, limits, rng, by)
    return pick_cover(reader, n, take, limits, shrinker, decoded if isinstance(reader, TarReader) else None)


def pick_rows(
    source: Any,
    n: int,
    rows: str,
    *,
    seed: int = 0,
    by: str | None = None,
    split: str | None = None,
    config: str | None = None,
    side: int = 32,
    skip_bad: bool = False,
    offline: bool | None = None,
) -> tuple[str, Picked, Any, Any]:
    """Rows of one split of a source, for `unpack`: the source's name, what was picked, the table and its features."""
    _check(n, rows, side, "auto")
    opened = _open(source, config, offline)
    name = _chosen(opened, None if split is None else [split])[0]
    reader = opened.splits[name]
    shrinker = Shrinker(reader.features, side, opened.root)
    picked = _pick(reader, n, rows, _limits(rows), f"{seed} {name}", by, shrinker, skip_bad)
    if not picked.taken:
        raise _no_rows(opened, {name: _facts(picked, n, rows, reader.count)})
    table, features = _table(reader, picked.taken)
    return opened.name, picked, table, features


def _take_sample(shrinker: Shrinker) -> Any:
    def take(row: Row) -> Taken:
        values = row.load()
        check_sample(values, row.where)
        return shrinker.take_sample(row, values)

    return take


def _table(reader: Reader, taken: list[Taken]) -> tuple[Any, Any]:
    if isinstance(reader, TarReader):
        reader = Reader()
        taken, reader.features = samples_as_rows(taken)
    return make_table(reader, taken)


def _facts(picked: Picked, n: int, rows: str, count: int | None) -> SplitFacts:
    meter = picked.meter
    notes = list(picked.notes)
    if rows != "first" and not meter.complete:
        of = "the other rows" if count is None else f"{max(0, count - meter.rows):,} more rows"
        notes.append(f"not seen: {of}, as {meter.hit} after {meter.rows:,} rows")
    elif meter.hit and len(picked.taken) < n and not meter.complete:
        notes.append(f"{meter.hit} before {n} rows were found")
    elif len(picked.taken) < n and rows != "cover":
        notes.append(f"the source has no more than {len(picked.taken):,} rows that can be used")
    return SplitFacts(
        rows=len(picked.taken),
        seen=meter.rows,
        complete=meter.complete,
        bytes=0,
        indices=tuple(row.index for row in picked.taken),
        covered=picked.covered,
        skipped=tuple(dict.fromkeys(picked.skipped)),
        notes=tuple(notes),
    )


def _no_rows(opened: Opened, facts: dict[str, SplitFacts]) -> MldebugError:
    skipped = [text for fact in facts.values() for text in fact.skipped]
    if skipped:
        return MldebugError(f"{opened.name} has no row that can be used: {_first_of(skipped)}", "mend the source first")
    return MldebugError(f"{opened.name} has no rows", "give a source that is not empty")


def _first_of(skipped: list[str]) -> str:
    first, *others = dict.fromkeys(skipped)
    return f"{first} (and {len(others)} more)" if others else first


def _chosen(opened: Opened, splits: Sequence[str] | None) -> list[str]:
    if splits is None:
        return list(opened.splits)
    for name in splits:
        if name not in opened.splits:
            raise UsageError(f"{opened.name} has no split {name!r}", f"its splits: {', '.join(opened.splits)}")
    return list(dict.fromkeys(splits))


def _as_tar(format: str, opened: Opened) -> bool:
    is_tar = all(isinstance(reader, TarReader) for reader in opened.splits.values())
    if format == "tar" and not is_tar:
        raise UsageError(f"{opened.name} is no webdataset, and cannot be written as one", "leave --format out")
    return is_tar and format != "parquet"


def _limits(
    rows: str,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    max_seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Limits:
    """Those that were given, and for all but the first rows the usual ones."""
    usual = Limits(sys.maxsize, sys.maxsize, math.inf) if rows == "first" else Limits()
    return Limits(max_rows or usual.rows, max_bytes or usual.bytes, max_seconds or usual.seconds, Stop(), progress)


def _check(
    n: int,
    rows: str,
    side: int,
    format: str,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    max_seconds: float | None = None,
) -> None:
    if n < 1:
        raise UsageError(f"a dataset of {n} rows", "-n takes a number of 1 or more")
    if rows not in WAYS:
        raise UsageError(f"there is no way {rows!r} to choose rows", f"choose {', '.join(WAYS)}")
    if side < 1:
        raise UsageError(f"pictures of {side} pixels", "--side takes a number of 1 or more")
    if format not in ("auto", "parquet", "tar"):
        raise UsageError(f"there is no format {format!r}", "choose auto, parquet or tar")
    if min(limit for limit in (max_rows, max_bytes, max_seconds, 1) if limit is not None) <= 0:
        raise UsageError("a limit of 0 lets no row through", "give --max-rows, --max-bytes and --max-seconds above 0")


def refuse(target: Path, force: bool, mark: str = RECORD) -> None:
    """Before any work: what would be in the way at its end. Only a folder with the file `mark` is ever replaced."""
    if target.is_dir() and any(target.iterdir()):
        if not force:
            raise UsageError(
                f"{target} exists and is not empty", "choose another folder, or --force to replace an earlier one"
            )
        if not (target / mark).is_file():
            raise UsageError(f"{target} was not written by this command: it is not replaced", "choose another folder")
    elif target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", "choose the name of a new folder")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {target.absolute().parent}", f"mkdir -p {target.absolute().parent}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of the libraries: the report says what there is to say."""
    import datasets
    from datasets.utils import logging
    from huggingface_hub.utils import logging as hub

    level, hub_level, bars = logging.get_verbosity(), hub.get_verbosity(), datasets.are_progress_bars_disabled()
    logging.set_verbosity(logging.CRITICAL)
    hub.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.set_verbosity(hub_level)
        if not bars:
            datasets.enable_progress_bars()


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from mldebug import __version__

    return {"mldebug": __version__, **{name: version(name) for name in ("datasets", "pyarrow", "pillow")}}


def _type_text(feature: Any) -> str:
    text = str(getattr(feature, "dtype", None) or "") if type(feature).__name__ == "Value" else ""
    return text or " ".join(str(feature).split())[:60]
