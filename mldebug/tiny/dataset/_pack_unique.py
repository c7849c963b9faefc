"""Making repeated records distinct: a number in the texts, or in a picture."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

from mldebug.tiny.dataset._media import map_media, media_kind

TRIES = 64


class Distinct:
    """Changes rows until each is unlike all before it. The first row of a kind stays as it is."""

    def __init__(self, features: Any) -> None:
        self.features = features
        self.seen: set[bytes] = set()

    def row(self, row: Mapping[str, Any], number: int) -> dict[str, Any] | None:
        """The row, or the row with `number` in its texts, else in its pictures, else in its numbers. None: it has none
        of them that can be changed."""
        found = dict(row)
        if self._is_new(found):
            return found
        for attempt in range(TRIES):
            mark, changed = number + attempt * 7919, None
            for change in (_number_texts, _number_pictures, _number_values):
                new = change(row, self.features, mark)
                changed = changed or new
                if new is not None and self._is_new(new):
                    return new
            if changed is None:
                break
        return None

    def _is_new(self, row: Mapping[str, Any]) -> bool:
        digest = hashlib.blake2b(
            repr(map_media(row, self.features, _pixels)).encode("utf-8", "replace"), digest_size=16
        )
        if digest.digest() in self.seen:
            return False
        self.seen.add(digest.digest())
        return True


def _pixels(file: Mapping[str, Any], kind: str) -> Any:
    """What a file shows, so that pictures that differ in their bytes only are equal."""
    if kind != "image":
        return file["bytes"]
    from PIL import Image

    with Image.open(io.BytesIO(file["bytes"])) as image:
        return image.mode, image.size, image.tobytes(), image.getpalette() if image.mode == "P" else None


def _number_texts(row: Mapping[str, Any], features: Any, mark: int) -> dict[str, Any] | None:
    """The number after the first text of each column of texts."""
    changed = dict(row)
    for name, value in row.items():
        if _is_text(features[name]) and value is not None:
            changed[name] = f"{value} {mark}".lstrip()
        elif isinstance(value, list) and _is_text(getattr(features[name], "feature", None)):
            slot = next((i for i, item in enumerate(value) if item is not None), None)
            if slot is not None:
                changed[name] = [*value[:slot], f"{value[slot]} {mark}".lstrip(), *value[slot + 1 :]]
    return changed if changed != dict(row) else None


def _number_pictures(row: Mapping[str, Any], features: Any, mark: int) -> dict[str, Any] | None:
    """The number as a pattern of light and dark blocks in the first picture."""
    done = False

    def mark_first(file: Any, kind: str) -> Any:
        nonlocal done
        if done or kind != "image":
            return file
        done = True
        return {**file, "bytes": draw_number(file["bytes"], mark)}

    changed = {name: map_media(value, features[name], mark_first) for name, value in row.items()}
    return changed if done else None


def draw_number(data: bytes, number: int) -> bytes:
    """The picture with `number` in blocks along its edges: each bit a block, light or dark, that survives JPEG."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        form, mode = image.format, image.mode
        image.load()
        copy = image.copy()
        info = image.info
    block = max(1, min(copy.size) // 8)
    columns = max(1, copy.width // block)
    dark, light = _extremes(copy)
    for bit in range(max(16, number.bit_length())):
        left, top = bit % columns * block, bit // columns * block
        if top >= copy.height:
            break
        copy.paste(light if number >> bit & 1 else dark, (left, top, left + block, top + block))
    options: dict[str, Any] = {"quality": 95} if form in ("JPEG", "WEBP") else {}
    if "transparency" in info and mode == "P":
        options["transparency"] = info["transparency"]
    buffer = io.BytesIO()
    copy.save(buffer, format=form, **options)
    return buffer.getvalue()


def _extremes(image: Any) -> tuple[Any, Any]:
    """A dark and a light colour of the picture's mode."""
    if image.mode == "P":
        used = sorted(color for _count, color in image.getcolors(256) or [(1, 0)])
        return used[0], used[-1] if used[-1] != used[0] else (used[0] + 1) % 256
    bands = len(image.getbands())
    top = {"1": 1, "F": 1.0, "I": 65535}.get(image.mode, 65535 if image.mode.startswith("I;16") else 255)
    return (0, top) if bands == 1 else ((0,) * bands, (top,) * bands)


def _number_values(row: Mapping[str, Any], features: Any, mark: int) -> dict[str, Any] | None:
    """The number in the first column of whole or broken numbers."""
    for name, value in row.items():
        kind = str(getattr(features[name], "dtype", ""))
        if type(features[name]).__name__ != "Value" or isinstance(value, bool) or media_kind(features[name]):
            continue
        if kind in ("int64", "uint64", "int32", "uint32", "float64") and isinstance(value, (int, float)):
            return {**row, name: value + mark}
    return None


def _is_text(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and feature.dtype in ("string", "large_string")
