"""Finding out what a source is: its splits, how to read them, and its card."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._files import path_of
from mldebug.tiny._hub import not_found, why
from mldebug.tiny.dataset._lines import CsvReader, JsonReader, TextReader
from mldebug.tiny.dataset._loaded import DatasetReader, StreamReader
from mldebug.tiny.dataset._rows import Reader
from mldebug.tiny.dataset._tables import ArrowReader, ParquetReader
from mldebug.tiny.dataset._tar import TarReader

_KINDS = {
    "jsonl": "json",
    "ndjson": "json",
    "json": "json",
    "csv": "csv",
    "tsv": "csv",
    "parquet": "parquet",
    "geoparquet": "parquet",
    "gpq": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "txt": "text",
    "text": "text",
    "tar": "webdataset",
    "tgz": "webdataset",
}
_COMPRESSED = ("gz", "bz2", "xz", "zst", "zstd", "lz4")


@dataclass
class Opened:
    """A source that was found: a reader for each split."""

    name: str
    kind: str  # json, csv, text, parquet, arrow, webdataset, saved, or the name of a loader of datasets
    splits: dict[str, Reader]
    root: str | None = None  # the folder that paths in rows are relative to
    card: str = ""  # the text of its README.md
    config: str = "default"
    notes: list[str] = field(default_factory=list)


def open_source(source: Any, *, config: str | None = None, offline: bool | None = None) -> Opened:
    """Look at a file, a folder, a pattern such as "data/*.parquet", the id of a hub repository, or a dataset that is
    loaded already; read no row."""
    if not isinstance(source, (str, os.PathLike)):
        return _loaded(source)
    text = os.fspath(source)
    path = Path(text).expanduser()
    there = path_of(text)
    if there is not None and there.is_dir():
        return _folder(path, text, config)
    if there is not None:
        if config is not None:
            raise UsageError(f"{text} is a file, which has no configurations", "leave --config out")
        return _files([path], text)
    if any(sign in text for sign in "*?["):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if found:
            return _files(found, text)
        raise UsageError(f"no file matches {text}", "quote the pattern, and try it with ls")
    if _looks_like_a_path(text):
        raise UsageError(f"cannot read {text}: no such file or folder", _near(path))
    return _hub(text, config, offline)


def _files(paths: list[Path], name: str) -> Opened:
    kinds = {_kind_of(path) for path in paths}
    if len(kinds) > 1 or None in kinds:
        odd = next((path for path in paths if _kind_of(path) is None), paths[0])
        raise UsageError(
            f"cannot tell what {odd} is" if None in kinds else f"{name} has files of several kinds",
            f"files end in .{', .'.join(_KINDS)}, also with .{', .'.join(_COMPRESSED[:4])}",
        )
    kind = str(kinds.pop())
    for path in paths:
        _check_readable(path)
    opened = Opened(name, kind, {}, root=str(paths[0].parent))
    opened.splits["train"] = _reader(kind, paths, None, {})
    return opened


def _kind_of(path: Path) -> str | None:
    parts = path.name.lower().split(".")[1:]
    while parts and parts[-1] in _COMPRESSED:
        parts.pop()
    return _KINDS.get(parts[-1]) if parts else None


def _check_readable(path: Path) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as exc:
        raise MldebugError(
            f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check its permissions"
        ) from None
    if path.stat().st_size == 0:
        raise MldebugError(f"{path} is empty", "give a file with rows in it")


def _reader(kind: str, paths: list[Path], features: Any, options: Mapping[str, Any]) -> Reader:
    if kind == "csv":
        return CsvReader(paths, features, options)
    if kind == "webdataset":
        return TarReader(paths)
    makers: dict[str, Callable[[list[Path], Any], Reader]] = {
        "json": JsonReader,
        "text": TextReader,
        "parquet": ParquetReader,
        "arrow": ArrowReader,
    }
    return makers[kind](paths, features)


def _folder(path: Path, name: str, config: str | None) -> Opened:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved(path, name)
    if not any(path.iterdir()):
        raise MldebugError(f"{name} is an empty folder", "give a folder with data files in it")
    builder = _builder(str(path.resolve()), name, config)
    opened = _built(builder, name, str(path.resolve()))
    with contextlib.suppress(OSError, UnicodeDecodeError):
        opened.card = (path / "README.md").read_text(encoding="utf-8")
    return opened


def _saved(path: Path, name: str) -> Opened:
    """What save_to_disk wrote."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as exc:
        raise MldebugError(
            f"cannot load {name}: {_reason(exc)}",
            "it was written by save_to_disk, and a file of it is missing or broken",
        ) from exc
    splits = dict(loaded) if isinstance(loaded, DatasetDict) else {str(loaded.split or "train"): loaded}
    if not splits:
        raise MldebugError(f"{name} has no splits", "its dataset_dict.json names none")
    # A split may be an expression such as "train[:10%]": what is saved is a split of its own.
    readers = {_split_name(split): DatasetReader(data, _split_name(split)) for split, data in splits.items()}
    return Opened(name, "saved", {**readers}, root=str(path))


def _loaded(data: Any) -> Opened:
    """A Dataset or IterableDataset, or a dict of them."""
    from datasets import Dataset, IterableDataset

    found = (
        dict(data) if isinstance(data, Mapping) else {_split_name(str(getattr(data, "split", None) or "train")): data}
    )
    splits: dict[str, Reader] = {}
    for name, part in found.items():
        if isinstance(part, Dataset):
            splits[str(name)] = DatasetReader(part, str(name))
        elif isinstance(part, IterableDataset):
            splits[str(name)] = StreamReader(lambda part=part: part, part.features, str(name))  # type: ignore[misc]
        else:
            kind = type(part).__name__
            raise UsageError(f"{kind} is no dataset", "give a path, a hub id, or a Dataset or IterableDataset")
    return Opened(type(data).__name__, "loaded", splits)


def _split_name(split: str) -> str:
    return split.split("[", maxsplit=1)[0].split("+", maxsplit=1)[0] or "train"


def _builder(source: str, name: str, config: str | None) -> Any:
    from datasets import load_dataset_builder
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    try:
        if not os.path.isdir(source):
            return load_dataset_builder(source, name=config)
        with tempfile.TemporaryDirectory(prefix="mldebug-") as cache:  # a lock file is all that it holds
            return load_dataset_builder(source, name=config, cache_dir=cache)
    except (DataFilesNotFoundError, FileNotFoundError, DatasetNotFoundError) as exc:
        if isinstance(exc, DatasetNotFoundError) or not os.path.isdir(source):
            raise
        raise MldebugError(f"{name} has no data files: {_reason(exc)}", "give the folder that they are in") from exc
    except Exception as exc:
        if not os.path.isdir(source):
            raise
        hint = (
            "name one with --config"
            if "onfig name" in str(exc) or "BuilderConfig" in str(exc)
            else "check its README.md"
            if os.path.isfile(os.path.join(source, "README.md"))
            else "give the folder that holds the data files, or one of the files"
        )
        raise MldebugError(f"cannot open {name}: {_reason(exc)}", hint) from exc


def _built(builder: Any, name: str, root: str | None) -> Opened:
    """A reader for each split of a builder: our own for local files of the usual kinds, the builder's for the rest."""
    kind = type(builder).__module__.rsplit(".", 1)[-1]
    opened = Opened(name, kind, {}, root=root, config=str(builder.config.name or "default"))
    files = builder.config.data_files or {}
    features = builder.info.features
    for split, paths in files.items():
        local = [Path(path) for path in paths if "://" not in str(path)]
        if kind in set(_KINDS.values()) and len(local) == len(paths) and not getattr(builder.config, "field", None):
            options = {"sep": builder.config.sep} if kind == "csv" and builder.config.sep != "," else {}
            local = [path for path in local if path.suffix != ".zip"] or local
            opened.splits[str(split)] = _reader(kind, local, features, options)
    if len(opened.splits) < len(files) or not files:
        opened.splits = {split: _stream(builder, split) for split in _stream_splits(builder, name)}
    if not opened.splits:
        raise MldebugError(f"{name} has no splits", "give a folder or repository with data files in it")
    return opened


def _stream_splits(builder: Any, name: str) -> list[str]:
    if builder.config.data_files:
        return [str(split) for split in builder.config.data_files]
    try:
        return [str(split) for split in builder.as_streaming_dataset()]
    except Exception as exc:
        raise MldebugError(f"cannot read {name}: {_reason(exc)}", "check that the source is complete") from exc


def _stream(builder: Any, split: str) -> StreamReader:
    features = builder.info.features
    if features is None:
        with contextlib.suppress(Exception):  # what is wrong is said when the rows are read
            features = builder.as_streaming_dataset(split=split).features
    return StreamReader(lambda: builder.as_streaming_dataset(split=split), features, split)


def _hub(name: str, config: str | None, offline: bool | None) -> Opened:
    """A repository of the hub, streamed; or what the cache has of it, where the network may not or cannot be used."""
    from datasets import config as settings

    local = bool(offline or (offline is None and (settings.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE"))))
    trouble = None if local else _unreachable(name)
    if local or trouble is not None:
        try:
            with _offline():
                opened = _cached(_builder(name, name, config), name)
        except Exception as exc:
            if "onfigurations in the cache" in str(exc):
                raise UsageError(f"{name}: {_reason(exc)}", "name one with --config") from exc
            raise not_found(name, trouble or exc, "dataset", local) from exc
        reason = "offline" if trouble is None else f"the hub does not answer: {why(trouble)}"
        opened.notes.append(f"from the cache ({reason})")
        return opened
    try:
        opened = _built(_builder(name, name, config), name, None)
    except MldebugError:
        raise
    except Exception as exc:
        reason = _reason(exc)
        hint = "name one with --config" if "onfig" in reason else "log in, if it is private or gated"
        raise MldebugError(f"cannot open {name}: {reason}", hint) from exc
    opened.card = _hub_card(name)
    return opened


def _unreachable(name: str) -> Exception | None:
    """Asked once, as datasets would try for half a minute: why the hub does not answer. No dataset of this name is an
    error."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(name, timeout=20)
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise not_found(name, exc, "dataset") from exc
    except Exception as exc:
        return exc
    return None


def _cached(builder: Any, name: str) -> Opened:
    data = builder.as_dataset()
    splits: dict[str, Reader] = {str(split): DatasetReader(data[split], str(split)) for split in data}
    return Opened(name, "cache", splits, config=str(builder.config.name or "default"))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    from datasets import config as settings
    from huggingface_hub import constants

    old = settings.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = old


def _hub_card(name: str) -> str:
    with contextlib.suppress(Exception):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "README.md", repo_type="dataset")).read_text(encoding="utf-8")
    return ""


def _looks_like_a_path(text: str) -> bool:
    """Whether this can be no id of a repository: those are `name` or `owner/name`."""
    return (
        text.startswith((".", "/", "~"))
        or text.endswith("/")
        or text.count("/") > 1
        or _kind_of(Path(text)) is not None
        or any(sign in text for sign in " \\:")
        or not text
    )


def _near(path: Path) -> str:
    folder = path.parent if str(path.parent) else Path(".")
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"the current folder is {os.getcwd()}" if folder.is_dir() else f"there is no folder {folder}"


def _reason(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__
