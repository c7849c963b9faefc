"""Writing a set that `load_dataset(folder)` loads without a script: Parquet or tar files, and a card."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tiny.dataset._media import plain_features
from mldebug.tiny.dataset._rows import BadRow, Reader, Taken
from mldebug.tiny.dataset._tar import TarReader, decoded, tar_features, write_tar

RECORD = "mldebug_dataset.json"
_EMPTY = {
    "txt": b"",
    "text": b"",
    "transcript": b"",
    "json": b"null",
    "jsn": b"null",
}  # missing, in a member's own terms


def make_table(reader: Reader, taken: list[Taken]) -> tuple[Any, Any]:
    """The rows as one table that holds nothing else, and its features."""
    from datasets import Features

    rows, features, table = taken, reader.features, reader.table(taken)
    if isinstance(reader, TarReader):
        rows, features = samples_as_rows(taken)
    if table is None:
        table = _joined(rows) if rows[0].table is not None else _from_values(rows, features)
    if not _fits(features, table):
        features = Features.from_arrow_schema(table.schema)
    if not table.schema.equals(features.arrow_schema):
        from datasets.table import table_cast

        table = table_cast(table, features.arrow_schema)
    return table, features


def _fits(features: Any, table: Any) -> bool:
    return features is not None and set(features) == set(table.column_names)


def _joined(rows: list[Taken]) -> Any:
    """The rows' own tables, one after the other."""
    import pyarrow

    try:
        table = pyarrow.concat_tables([row.table for row in rows], promote_options="permissive")
    except (ValueError, TypeError) as exc:
        raise MldebugError(f"the rows have no types in common: {exc}", "give the files one by one") from exc
    return table.combine_chunks()


def _from_values(rows: list[Taken], features: Any) -> Any:
    from datasets import Dataset

    names = list(dict.fromkeys(name for row in rows for name in row.values))
    if features is not None:
        names = list(features) if set(names) <= set(features) else names
        features = features if set(names) == set(features) else None
    columns = {name: [row.values.get(name) for row in rows] for name in names}
    try:
        plain = None if features is None else plain_features(features)
        return Dataset.from_dict(columns, features=plain, on_mixed_types="use_json").with_format("arrow")[:]
    except Exception as exc:
        raise MldebugError(
            f"the rows make no table: {' '.join(str(exc).split())[:200]}",
            _odd_column(columns) or "look at the first rows",
        ) from exc


def _odd_column(columns: Mapping[str, list[Any]]) -> str:
    from datasets import Dataset

    for name, values in columns.items():
        try:
            Dataset.from_dict({name: values}, on_mixed_types="use_json")
        except Exception:
            return f"column {name!r} has values that no Arrow type holds, such as {str(values[0])[:40]!r}"
    return ""


def unify(made: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """The same features for all splits, as one card can say: a column that is empty in one of them has the type that it
    has in another, and one that is missing is None."""
    from datasets import Features
    from datasets.table import table_cast

    if len({str(features) for _table, features in made.values()}) == 1:
        return dict(made)
    merged: dict[str, Any] = {}
    for _table, features in made.values():
        for name, feature in features.items():
            if name not in merged or getattr(merged[name], "dtype", "") == "null":
                merged[name] = feature
    shared = Features(merged)
    result = {}
    for split, (table, _features) in made.items():
        import pyarrow

        for name in shared:
            if name not in table.column_names:
                table = table.append_column(name, pyarrow.nulls(len(table)))
        try:
            result[split] = (table_cast(table.select(list(shared)), shared.arrow_schema), shared)
        except (ValueError, TypeError) as exc:
            raise MldebugError(
                f"split {split} has other types than the splits before it: {' '.join(str(exc).split())[:160]}",
                f"take it by itself, with --split {split}",
            ) from exc
    return result


def write_parquet(folder: Path, split: str, table: Any, features: Any) -> Path:
    """One Parquet file, named as the hub names them, with the features in its schema."""
    import pyarrow.parquet as parquet

    path = folder / "data" / f"{split}-00000-of-00001.parquet"
    path.parent.mkdir(exist_ok=True)
    table = table.replace_schema_metadata(features.arrow_schema.metadata)
    parquet.write_table(table, path, row_group_size=max(1, min(1000, len(table))))
    return path


def write_samples(folder: Path, split: str, taken: Sequence[Taken], fill: bool) -> tuple[Path, Any, list[str]]:
    """One tar, its features over all samples, and notes on members that only some samples have."""
    views = [decoded(row.values, row.where) for row in taken]
    path = folder / "data" / f"{split}-00000.tar"
    path.parent.mkdir(exist_ok=True)
    names = {name for view in views for name in view}
    optional = sorted(name for name in names if any(name not in view for view in views))
    empties = {name: _EMPTY[name.rsplit(".", 1)[-1]] for name in optional if name.rsplit(".", 1)[-1] in _EMPTY}
    write_tar(path, taken, empties if fill else {})
    features = tar_features([{**view, "__url__": ""} for view in views])
    features = type(features)({name: features[name] for name in sorted(features, key=_tar_order)})
    notes = []
    if optional and fill:
        kept = [name for name in optional if name not in empties]
        notes.append(f"members that were missing are empty now: {', '.join(empties) or 'none'}")
        notes += [f"members that nothing can stand for are still missing: {', '.join(kept)}"] if kept else []
    elif optional:
        notes.append(f"some samples lack {', '.join(optional)}: load the folder, whose card has the columns")
    return path, features, notes


def _tar_order(name: str) -> tuple[int, str]:
    return (
        ("__key__", "__url__").index(name) + 1 if name.startswith("__") else 0,
        "" if name.startswith("__") else name,
    )


def samples_as_rows(taken: Sequence[Taken]) -> tuple[list[Taken], Any]:
    """Samples of a tar as the rows that datasets makes of them, for Parquet."""
    from mldebug.tiny.dataset._media import kind_of_file

    views = [decoded(row.values, row.where) for row in taken]
    features = tar_features(views)
    rows = []
    for row, view in zip(taken, views, strict=True):
        values = {
            name: {"bytes": value, "path": f"{row.values['__key__']}.{name}"}
            if kind_of_file(name) is not None and name != "__key__"
            else value
            for name, value in view.items()
        }
        rows.append(Taken(row.index, row.where, values))
    return rows, features


def check_sample(values: Mapping[str, Any], where: str) -> None:
    """A sample whose members datasets cannot decode is a BadRow: one such sample stops it from loading the tar."""
    decoded(values, where)
    if not any(name != "__key__" for name in values):
        raise BadRow(f"{where}: it has no members")


def write_card(
    folder: Path, card: str, config: str, splits: Mapping[str, tuple[Path, int, Any]], lines: Sequence[str]
) -> None:
    """README.md: the source's card with the features, sizes and files of this set in the place of its own."""
    from datasets import DatasetInfo
    from datasets.splits import SplitDict, SplitInfo

    first = next(iter(splits.values()))[2]
    total = sum(rows for _path, rows, _features in splits.values())
    size = sum(path.stat().st_size for path, _rows, _features in splits.values())
    infos = SplitDict()
    for name, (path, rows, _features) in splits.items():
        infos.add(SplitInfo(name=name, num_bytes=path.stat().st_size, num_examples=rows))
    info = DatasetInfo(features=first, splits=infos, download_size=size, dataset_size=size)
    described = info._to_yaml_dict()
    head, body = _split_card(card)
    for key in ("dataset_info", "configs", "size_categories", "train-eval-index", "viewer"):
        head.pop(key, None)
    named = {} if config == "default" else {"config_name": config}
    head["size_categories"] = [_size_category(total)]
    head["dataset_info"] = {**named, **described}
    files = [{"split": name, "path": f"data/{path.name}"} for name, (path, _rows, _features) in splits.items()]
    head["configs"] = [{"config_name": config, "data_files": files}]
    import yaml

    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    note = "\n".join(f"- {line}" for line in lines)
    body = body.strip() or f"# {folder.name.strip('.').split('.')[0]}"
    (folder / "README.md").write_text(
        f"---\n{text}---\n\n{body}\n\n## This is a tiny version\n\nMade by `mldebug tiny-dataset`.\n\n{note}\n",
        encoding="utf-8",
    )


def _split_card(card: str) -> tuple[dict[str, Any], str]:
    import yaml

    card = re.sub(r"\n## This is a tiny version\n.*\Z", "\n", card, flags=re.S)
    match = re.match(r"\A\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)(.*)\Z", card, re.S)
    if not match:
        return {}, card
    try:
        head = yaml.safe_load(match[1])
    except yaml.YAMLError:
        return {}, match[2]
    return (head if isinstance(head, dict) else {}), match[2]


def _size_category(rows: int) -> str:
    for limit, text in ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M")):
        if rows < limit:
            return text
    return "1M<n<10M"


def write_record(folder: Path, facts: Mapping[str, Any]) -> None:
    """What the set was made of, and how, so that it can be made again."""
    (folder / RECORD).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def folder_size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


__all__ = [
    "RECORD",
    "check_sample",
    "folder_size",
    "make_table",
    "samples_as_rows",
    "unify",
    "write_card",
    "write_parquet",
    "write_record",
    "write_samples",
]


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


def feature_text(feature: Any) -> str:
    """The type of a column in a few words."""
    plain = str(getattr(feature, "dtype", None) or "") if type(feature).__name__ == "Value" else ""
    return plain or " ".join(str(feature).split())[:60]
