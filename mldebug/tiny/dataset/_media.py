"""Pictures, sounds and other files inside rows: found by their features or their bytes, embedded, and made small."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from mldebug.tiny.dataset._rows import BadRow, Row, Taken

WAV_SECONDS = 1.0
_LOSSLESS_RESIZE = ("1", "P", "PA", "I;16", "I;16B", "I;16L")  # between their values there is nothing to average


class Shrinker:
    """Makes rows of the result from rows of a source. `side` is the longest side of a picture in pixels."""

    def __init__(self, features: Any, side: int, root: str | None = None) -> None:
        self.features, self.side, self.root = features, side, root
        self.notes: Counter[str] = Counter()

    def take(self, row: Row) -> Taken:
        """The row with its media embedded and small. A row that cannot be had is a BadRow."""
        table = None if row.table is None else row.table()
        if table is not None:
            columns = [name for name in table.column_names if self._may_hold_media(table.schema.field(name))]
            found = table.select(columns).to_pylist()[0] if columns else {}
        else:
            found = dict(row.load())
        values = {}
        for name, value in found.items():
            try:
                values[name] = self._walk(value, None if self.features is None else self.features.get(name))
            except BadMedia as exc:
                raise BadRow(f"{row.where}: {name}: {exc}") from None
            if table is not None and values[name] != value:
                table = _with(table, name, values[name])  # the large picture goes at once, not when all are read
        return Taken(row.index, row.where, {} if table is not None else values, table)

    def take_sample(self, row: Row, members: Mapping[str, Any]) -> Taken:
        """The same for a sample of a tar: pictures and sounds are members with such an extension."""
        values = dict(members)
        for name, data in members.items():
            kind = None if name == "__key__" else kind_of_file(name)
            try:
                if kind == "image" and data:
                    values[name] = self._image(data)
                elif kind == "audio" and data:
                    values[name] = self._audio(data)
            except BadMedia as exc:
                raise BadRow(f"{row.where}: {name}: {exc}") from None
        return Taken(row.index, row.where, values)

    def _may_hold_media(self, field: Any) -> bool:
        feature = None if self.features is None else self.features.get(field.name)
        return feature_has_media(feature) or _type_has_bytes(field.type)

    def _walk(self, value: Any, feature: Any) -> Any:
        """The value with every picture and sound in it replaced, whatever lists and structs they are in."""
        if value is None:
            return None
        kind = media_kind(feature)
        if kind is not None:
            return self._file(value, kind)
        if isinstance(value, Mapping):
            if set(value) == {"bytes", "path"} and isinstance(value["bytes"], bytes):
                return {"bytes": self._sniffed(value["bytes"]), "path": _base_name(value["path"])}
            if set(value) == {"bytes", "path"} and isinstance(value["path"], str):
                with contextlib.suppress(BadMedia):  # it may be something else that has these names
                    return {"bytes": self._sniffed(self.read(value["path"])), "path": _base_name(value["path"])}
            return {key: self._walk(item, _inner(feature, key)) for key, item in value.items()}
        if isinstance(value, list):
            inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
            return [self._walk(item, inner) for item in value]
        return self._sniffed(value) if isinstance(value, bytes) else value

    def _file(self, value: Any, kind: str) -> dict[str, Any]:
        path, data = (value, None) if isinstance(value, str) else (value.get("path"), value.get("bytes"))
        if data is None:
            if path is None:
                raise BadMedia("it has neither bytes nor a path")
            data = self.read(path)
        try:
            if kind == "image":
                data = self._image(data)
            elif kind == "audio":
                data = self._audio(data)
            else:
                self.notes[f"{kind} files are kept as they are"] += 1
        except BadMedia as exc:
            raise BadMedia(f"{path}: {exc}") if path else exc from None
        return {"bytes": data, "path": _base_name(path)}

    def _sniffed(self, data: bytes) -> bytes:
        if looks_like_image(data):
            with contextlib.suppress(BadMedia):  # it only looked like one
                return self._image(data)
        return self._audio(data) if data[:4] == b"RIFF" and data[8:12] == b"WAVE" else data

    def read(self, path: str) -> bytes:
        """The bytes of a file that a row only names."""
        try:
            if "://" in path:
                from datasets.utils.file_utils import xopen

                with xopen(path, "rb") as remote:
                    return bytes(remote.read())
            for candidate in (path, os.path.join(self.root or "", path)):
                if os.path.isfile(candidate):
                    with open(candidate, "rb") as file:
                        return file.read()
        except Exception as exc:
            raise BadMedia(f"cannot read {path}: {_reason(exc)}") from None
        raise BadMedia(f"there is no file {path}")

    def _image(self, data: bytes) -> bytes:
        small, note = shrink_image(data, self.side)
        if note:
            self.notes[note] += 1
        return small

    def _audio(self, data: bytes) -> bytes:
        if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
            return shorten_wav(data, WAV_SECONDS)
        self.notes["sounds that are no WAV are embedded at full length"] += 1
        return data


def _with(table: Any, name: str, value: Any) -> Any:
    import pyarrow

    place = table.schema.get_field_index(name)
    field = table.schema.field(place)
    return table.set_column(place, field, pyarrow.array([value], field.type))


class BadMedia(Exception):
    """A picture or sound that cannot be read."""


def shrink_image(data: bytes, side: int) -> tuple[bytes, str]:
    """The picture with no side above `side` pixels, in its own mode and format, and a note where that cannot be.

    A picture that is small enough comes back unchanged. One that does not decode is BadMedia.
    """
    if not data:
        raise BadMedia("the image is empty")
    try:
        with _quiet_pillow(), _open(data) as image:
            if max(image.size) <= side:
                image.load()
                return data, ""
            if getattr(image, "n_frames", 1) == 1:
                image.draft(None, (side * 2, side * 2))  # JPEG alone decodes at a fraction of its size
            return _shrunk(image, side)
    except BadMedia:
        raise
    except Exception as exc:
        raise BadMedia(f"the image does not decode: {_reason(exc)}") from None


def _shrunk(image: Any, side: int) -> tuple[bytes, str]:
    from PIL import Image, ImageSequence

    kind, mode = image.format, image.mode
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    frames = []
    for frame in ImageSequence.Iterator(image):
        method = Image.Resampling.NEAREST if frame.mode in _LOSSLESS_RESIZE else Image.Resampling.BOX
        frames.append(frame.resize(size, method))
        if len(frames) == 2:  # enough for a moving picture to stay one
            break
    if Image.registered_extensions() and kind not in Image.SAVE:
        return _saved(frames[:1], "PNG", image), f"{kind} images are PNG now: Pillow cannot write {kind}"
    result = _saved(frames, kind, image)
    with _open(result) as again:
        if (again.format, again.mode) != (kind, mode):
            return result, f"images of format {kind} and mode {mode} are {again.format} and {again.mode} now"
    return result, ""


def _saved(frames: list[Any], kind: str, image: Any) -> bytes:
    options: dict[str, Any] = {"JPEG": {"quality": 90}, "WEBP": {"quality": 90}}.get(kind, {})
    if len(frames) > 1:
        options = {**options, "save_all": True, "append_images": frames[1:]}
    if kind in ("PNG", "GIF") and "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    if kind == "JPEG" and image.info.get("progression"):
        options["progressive"] = True
    orientation = image.getexif().get(0x0112) if kind in ("JPEG", "MPO", "WEBP", "PNG", "TIFF") else None
    if orientation not in (None, 1):  # which side is up is part of the picture; the rest of EXIF is not
        from PIL import Image

        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    buffer = io.BytesIO()
    frames[0].save(buffer, format=kind, **options)
    return buffer.getvalue()


def image_facts(data: bytes) -> tuple[str, str]:
    """Format and mode of a picture, from its header."""
    with _quiet_pillow(), _open(data) as image:
        return str(image.format), str(image.mode)


def _open(data: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data))


@contextlib.contextmanager
def _quiet_pillow() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # corrupt EXIF and large pictures are not what the user asked about
        yield


def shorten_wav(data: bytes, seconds: float) -> bytes:
    """The first `seconds` of a WAV file: same rate, channels and coding, whole frames. Short ones stay as they are."""
    form, body = None, None
    for name, start, size in _chunks(data):
        if name == b"fmt ":
            form = data[start : start + size]
        elif name == b"data":
            body = data[start : start + size]
    if form is None or body is None or len(form) < 16:
        raise BadMedia("the WAV file has no header or no samples")
    _tag, _channels, _rate, per_second, block = struct.unpack("<HHIIH", form[:14])
    if not block or not per_second:
        raise BadMedia("the WAV file gives its samples no size")
    keep = max(block, int(per_second * seconds) // block * block)
    if len(body) <= keep:
        return data
    body = body[:keep]
    chunks = b"".join(
        name + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2)
        for name, part in ((b"fmt ", form), (b"data", body))
    )
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack("<4sI", data[at : at + 8])
        size = min(size, len(data) - at - 8)  # a stream that was cut, or one whose length was never filled in
        yield name, at + 8, size
        at += 8 + size + size % 2


def media_kind(feature: Any) -> str | None:
    """ "image", "audio" or another name for a feature whose values are files; None for other features."""
    name = type(feature).__name__
    return _FILE_FEATURES.get(name)


_FILE_FEATURES = {"Image": "image", "Audio": "audio", "Video": "video", "Pdf": "PDF", "Nifti": "NIfTI", "Mesh": "mesh"}


def feature_has_media(feature: Any) -> bool:
    """Whether there is a file anywhere inside a feature."""
    return any(media_kind(leaf) for leaf in leaves(feature))


def leaves(feature: Any) -> Iterator[Any]:
    """The features at the ends of lists and structs."""
    if isinstance(feature, Mapping):
        for inner in feature.values():
            yield from leaves(inner)
    elif isinstance(feature, list):
        yield from leaves(feature[0])
    elif getattr(feature, "feature", None) is not None:
        yield from leaves(feature.feature)
    else:
        yield feature


def plain_features(feature: Any) -> Any:
    """The features with a struct of bytes and path for each file, which is how Arrow has them: encoding a sound through
    its own feature takes a codec."""
    from datasets import Features, LargeList, List, Value

    if media_kind(feature):
        return {"bytes": Value("binary"), "path": Value("string")}
    if isinstance(feature, Mapping):
        plain = {name: plain_features(inner) for name, inner in feature.items()}
        return Features(plain) if isinstance(feature, Features) else plain
    if isinstance(feature, list):
        return [plain_features(feature[0])]
    if isinstance(feature, List):
        return List(plain_features(feature.feature), length=feature.length)
    return LargeList(plain_features(feature.feature)) if isinstance(feature, LargeList) else feature


def looks_like_image(data: bytes) -> bool:
    """Whether the first bytes are those of a common format."""
    return data.startswith((b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")) or (
        data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    )


def kind_of_file(name: str) -> str | None:
    """What datasets takes the member of a tar for, by its extension: "image", "audio" or None."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    extension = name.rsplit(".", 1)[-1].lower()
    if extension in WebDataset.IMAGE_EXTENSIONS:
        return "image"
    return "audio" if extension in WebDataset.AUDIO_EXTENSIONS else None


def map_media(value: Any, feature: Any, change: Callable[[Any, str], Any]) -> Any:
    """The value with `change(file, kind)` in the place of each file in it."""
    if value is None:
        return None
    kind = media_kind(feature)
    if kind is not None:
        return change(value, kind)
    if isinstance(value, Mapping):
        return {key: map_media(item, _inner(feature, key), change) for key, item in value.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [map_media(item, inner, change) for item in value]
    return value


def _inner(feature: Any, key: str) -> Any:
    if isinstance(feature, Mapping):
        return feature.get(key)
    inner = getattr(feature, "feature", None)  # a list of structs may be stored as a struct of lists
    return [inner[key]] if isinstance(inner, Mapping) and key in inner else None


def _type_has_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind):
        return True
    return any(_type_has_bytes(kind.field(i).type) for i in range(kind.num_fields)) if kind.num_fields else False


def _base_name(path: Any) -> str | None:
    return PurePosixPath(str(path).replace("\\", "/")).name if path else None


def _reason(exc: Exception) -> str:
    text = str(getattr(exc, "strerror", None) or exc) or type(exc).__name__
    return " ".join(text.split()).replace("cannot identify image file", "no known format").split(" <_io.")[0]
