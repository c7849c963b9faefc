"""A record as a folder of files: text.txt, image.jpg, texts_00.txt, image.null, meta.json."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny.dataset._media import image_facts, map_media, media_kind, plain_features

FEATURES = "features.json"
_SLOT = re.compile(r"(?P<name>.+)_(?P<slot>\d{2,})")
_IGNORED = (".", "~")  # what editors and systems leave behind: .DS_Store, text.txt~
_TEXT = (".txt",)
_IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
_SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus")


def write_features(folder: Path, features: Any) -> None:
    """The types of the columns, in the order of the columns."""
    (folder / FEATURES).write_text(
        json.dumps(features.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def write_files(folder: Path, row: Mapping[str, Any], features: Any) -> None:
    """Each value of a row as a file, or as one file for each slot of a list of texts or files."""
    for name, value in row.items():
        feature = features[name]
        stem = _stem(name)
        inner = _list_of_slots(feature)
        if value is None:
            (folder / f"{stem}.null").touch()
        elif inner is not None and value:
            width = max(2, len(str(len(value) - 1)))
            for slot, item in enumerate(value):
                _write_slot(folder, f"{stem}_{slot:0{width}d}", item, inner)
        elif inner is None and (_is_text(feature) or media_kind(feature) or _is_class(feature)):
            _write_slot(folder, stem, value, feature)
        else:
            _write_json(folder, stem, value, feature)


def _write_slot(folder: Path, stem: str, value: Any, feature: Any) -> None:
    if value is None:
        (folder / f"{stem}.null").touch()
    elif media_kind(feature):
        (folder / f"{stem}{_extension(value)}").write_bytes(value["bytes"])
    elif _is_class(feature):
        (folder / f"{stem}.txt").write_text(feature.int2str(value) if value >= 0 else str(value), encoding="utf-8")
    else:
        (folder / f"{stem}.txt").write_bytes(value.encode("utf-8"))


def _write_json(folder: Path, stem: str, value: Any, feature: Any) -> None:
    """Files deep inside a value are written beside it, and the JSON names them."""
    number = 0

    def beside(file: Mapping[str, Any], _kind: str) -> dict[str, str]:
        nonlocal number
        path = folder / f"{stem}.{number:02d}{_extension(file)}"
        path.write_bytes(file["bytes"])
        number += 1
        return {"$file": path.name}

    if type(feature).__name__ == "Json" and isinstance(value, str):
        value = json.loads(value)
    value = map_media(value, feature, beside)
    text = json.dumps(value, indent=1, ensure_ascii=False, default=_as_json)
    (folder / f"{stem}.json").write_text(text + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$base64": base64.b64encode(value).decode()}
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return {"$seconds": value.total_seconds()}
    return (
        str(value) if isinstance(value, decimal.Decimal) else value.tolist() if hasattr(value, "tolist") else str(value)
    )


def record_features(root: Path, records: Sequence[Path]) -> Any:
    """The features in features.json, or those that the names of the files and the values of the JSON tell."""
    from datasets import Features

    path = root / FEATURES
    if path.is_file():
        try:
            return Features.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except Exception as exc:
            raise MldebugError(
                f"cannot read {path}: {' '.join(str(exc).split())}", "delete it to go by file names"
            ) from exc
    columns: dict[str, Any] = {}
    for record in records:
        for name, feature in _features_of(record).items():
            if columns.get(name) is None or feature is not None:
                columns[name] = _wider(columns.get(name), feature, name, record)
    if not columns:
        raise MldebugError(f"the records in {root} have no files", "put files such as text.txt and image.jpg into them")
    from datasets import Value

    return Features({name: Value("null") if feature is None else feature for name, feature in columns.items()})


def _features_of(record: Path) -> dict[str, Any]:
    """Column -> its feature, None where only empty slots tell of it."""
    from datasets import Audio, Dataset, Image, List, Value

    found: dict[str, Any] = {}
    for path in _files(record):
        slot = _SLOT.fullmatch(path.stem)
        name = slot["name"] if slot else path.stem
        ending = path.suffix.lower()
        if ending == ".null":
            feature = None
        elif ending in _IMAGES:
            feature = Image()
        elif ending in _SOUNDS:
            feature = Audio()
        elif ending == ".json":
            if "." in path.stem:
                continue
            value = _read_json(path)
            feature = Dataset.from_dict({"x": [value]}, on_mixed_types="use_json").features["x"]
        elif ending in _TEXT:
            feature = Value("string")
        else:
            raise MldebugError(
                f"{path}: a file of an unknown kind",
                "use .txt, .json, .null, pictures and sounds, or write features.json",
            )
        if slot:
            feature = List(feature) if feature is not None else found.get(name)
        found[name] = _wider(found.get(name), feature, name, record)
    return found


def _wider(old: Any, new: Any, name: str, record: Path) -> Any:
    if old is None or new is None or old == new:
        return new if old is None else old
    kinds = {getattr(old, "dtype", ""), getattr(new, "dtype", "")}
    if kinds == {"int64", "float64"}:
        return old if old.dtype == "float64" else new
    raise MldebugError(
        f"{record.name}: {name} is {new}, and {old} in records before it",
        "a column has values of one kind in all records",
    )


def read_record(record: Path, features: Any) -> dict[str, Any]:
    """The values of a record. A column without a file is None."""
    files: dict[str, list[Path]] = {}
    for path in _files(record):
        files.setdefault(path.stem, []).append(path)
    for paths in files.values():
        if len(paths) > 1:
            raise UsageError(f"{record}: {' and '.join(path.name for path in paths)} are one slot", "keep one of them")
    used: set[str] = set()
    row = {name: _read_column(record, name, features[name], files, used) for name in features}
    odd = [stem for stem in files if stem not in used and "." not in stem]
    if odd:
        name = files[odd[0]][0].name
        raise UsageError(f"{record}/{name} belongs to no column", f"the columns are {', '.join(features)}")
    return row


def _read_column(record: Path, name: str, feature: Any, files: Mapping[str, list[Path]], used: set[str]) -> Any:
    stem = _stem(name)
    if stem in files:
        used.add(stem)
        return _read(files[stem][0], feature)
    inner = _list_of_slots(feature)
    slots = sorted(
        (int(match["slot"]), key)
        for key in files
        if (match := _SLOT.fullmatch(key)) and match["name"] == stem and inner is not None
    )
    used.update(key for _slot, key in slots)
    return [_read(files[key][0], inner) for _slot, key in slots] or None


def _read(path: Path, feature: Any) -> Any:
    ending = path.suffix.lower()
    if ending == ".null":
        return None
    if media_kind(feature):
        data = path.read_bytes()
        if media_kind(feature) == "image":
            try:
                image_facts(data)
            except Exception:
                raise MldebugError(
                    f"{path} is no picture that can be read", "replace it, or put a .null file there"
                ) from None
        return {"bytes": data, "path": path.name}
    if ending == ".json":
        return _restore(_read_json(path), path.parent)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise MldebugError(f"{path} is not UTF-8 (byte {exc.start})", "save it as UTF-8") from None
    if _is_class(feature):
        return _class_of(text.strip(), feature, path)
    return text


def _class_of(text: str, feature: Any, path: Path) -> int:
    if text in feature.names:
        return int(feature.str2int(text))
    if text.lstrip("-").isdecimal() and int(text) < len(feature.names):
        return int(text)
    raise MldebugError(f"{path}: there is no label {text!r}", f"the labels are {', '.join(feature.names[:20])}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as exc:
        raise MldebugError(f"{path} is no JSON: {exc}", "mend it") from None


def _restore(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_restore(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$file"}:
        path = folder / str(value["$file"])
        if path.parent != folder or not path.is_file():
            raise MldebugError(f"{folder}: there is no file {value['$file']}", "mend the JSON that names it")
        return {"bytes": path.read_bytes(), "path": path.name}
    if set(value) == {"$base64"}:
        return base64.b64decode(value["$base64"])
    if set(value) == {"$seconds"}:
        return datetime.timedelta(seconds=value["$seconds"])
    return {key: _restore(item, folder) for key, item in value.items()}


def records_table(rows: Sequence[Mapping[str, Any]], features: Any) -> Any:
    """The rows as an Arrow table of these features. Dates and decimals may be text."""
    import pyarrow
    from datasets import Dataset
    from datasets.table import table_cast

    plain = plain_features(features)
    columns = {name: [row.get(name) for row in rows] for name in features}
    try:
        table = Dataset.from_dict(columns, features=plain).with_format("arrow")[:]
    except Exception:
        parts = {}
        for name, values in columns.items():
            try:
                parts[name] = Dataset.from_dict({"x": values}, features=type(features)({"x": plain[name]})).data.column(
                    "x"
                )
            except Exception:
                try:
                    parts[name] = pyarrow.array(values).cast(plain.arrow_schema.field(name).type)
                except Exception as exc:
                    raise MldebugError(
                        f"column {name!r} does not fit its type {features[name]}: {' '.join(str(exc).split())[:160]}",
                        f"mend the files, or {FEATURES}",
                    ) from exc
        table = pyarrow.table(parts)
    return table_cast(table, features.arrow_schema).replace_schema_metadata(features.arrow_schema.metadata)


def _files(record: Path) -> list[Path]:
    return sorted(
        path for path in record.iterdir() if path.is_file() and not path.name.startswith(".") and path.name[-1] != "~"
    )


def _list_of_slots(feature: Any) -> Any:
    """The feature of the items, for a list of texts, labels or files."""
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return inner if inner is not None and (_is_text(inner) or media_kind(inner) or _is_class(inner)) else None


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string") and type(feature).__name__ == "Value"


def _is_class(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _extension(file: Mapping[str, Any]) -> str:
    ending = Path(str(file.get("path") or "")).suffix
    if ending:
        return ending.lower()
    try:
        form = image_facts(file["bytes"])[0].lower()
    except Exception:
        return ".wav" if file["bytes"][:4] == b"RIFF" else ".bin"
    return {"jpeg": ".jpg", "mpo": ".jpg", "tiff": ".tif"}.get(form, f".{form}")


def _stem(name: str) -> str:
    """The column's name as a file name."""
    return re.sub(r"[/\\:\0]", "-", name)
