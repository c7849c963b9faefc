"""Sources for the tests of tiny_dataset: pictures, sounds, tars, tables."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any


def picture(mode: str = "RGB", form: str = "PNG", size: tuple[int, int] = (100, 60), color: Any = None) -> bytes:
    """A picture with something in it: half dark, half light."""
    from PIL import Image, ImageDraw

    grey = Image.new("L", size, 30)
    ImageDraw.Draw(grey).rectangle((0, 0, size[0] // 2, size[1]), fill=220)
    image = grey.convert("RGB") if color is None else Image.new("RGB", size, color)
    if mode in ("P", "1", "L", "CMYK", "RGBA", "LA", "I"):
        image = image.convert("RGBA").convert("LA") if mode == "LA" else image.convert(mode)
    elif mode == "I;16":
        image = Image.frombytes("I;16", size, bytes(2 * size[0] * size[1]))
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def facts(data: bytes) -> tuple[str | None, str, tuple[int, int]]:
    """Format, mode and size of a picture that decodes."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.format, image.mode, image.size


def wav(seconds: float, rate: int = 8000, channels: int = 2, width: int = 2) -> bytes:
    """A WAV file whose frames are numbered."""
    frames = int(seconds * rate)
    block = channels * width
    data = b"".join((i % 251).to_bytes(1, "little") * block for i in range(frames))
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * block, block, 8 * width)
    chunks = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def write_tar(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for key, members in samples:
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(path: Path, split: str | None = "train", cache: Path | None = None) -> Any:
    """What datasets loads from the folder, without decoding files."""
    from datasets import load_dataset

    return load_dataset(str(path), split=split, cache_dir=None if cache is None else str(cache))


def stored(dataset: Any) -> list[dict[str, Any]]:
    """The rows as Arrow has them: files as bytes and path."""
    rows: list[dict[str, Any]] = dataset.with_format("arrow")[:].to_pylist()
    return rows


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files under a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
