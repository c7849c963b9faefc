"""Samples of webdataset tars: the members of each, as bytes, with the parts of a tar that are broken named."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mldebug.tiny.dataset._lines import FilesReader, gap, open_file
from mldebug.tiny.dataset._rows import BadRow, Row, Taken, at

KEY = "__key__"
_BLOCK = 512


class TarReader(FilesReader):
    """A row for each sample: its key, and a column with the bytes of each of its members, named by the extension."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(files)

    def rows_of(self, path: Path) -> Iterator[Row]:
        key, members, broken = "", dict[str, bytes](), ""
        for name, data, trouble in _members(path):
            if name is None:
                yield gap(path, trouble)
                continue
            base, extension = split_name(name)
            if not extension:
                continue
            if base != key:
                if members:
                    yield _sample(path, key, members, broken)
                key, members, broken = base, {}, ""
            if extension in members:
                broken = f"{extension} is there twice"
            broken = broken or (f"{extension}: {trouble}" if trouble else "")
            members[extension] = data
        if members:
            yield _sample(path, key, members, broken)

    def column(self, name: str, bad: list[str]) -> Iterator[tuple[Row, Any]]:
        for row in self.rows():
            try:
                value = at(decoded(row.load(), row.where), name)
            except BadRow as exc:
                bad.append(str(exc))
            else:
                yield row, value


def _sample(path: Path, key: str, members: dict[str, bytes], broken: str) -> Row:
    where = f"{path.name}:{key}"

    def load() -> Mapping[str, Any]:
        if broken:
            raise BadRow(f"{where}: {broken}")
        return {KEY: key, **members}

    return Row(0, where, load, sum(map(len, members.values())))


def split_name(name: str) -> tuple[str, str]:
    """The key and the extension of a member: the first dot of its file name parts them.

    split_name("a/0001.seg.png")  # ("a/0001", "seg.png")
    """
    folder, slash, base = name.rpartition("/")
    stem, _dot, extension = base.partition(".")
    return (f"{folder}{slash}{stem}", extension) if stem else (name, "")


def _members(path: Path) -> Iterator[tuple[str | None, bytes, str]]:
    """Name and bytes of each file. Where a header is broken the next good one is looked for, and the gap is named:
    tarfile alone takes the first broken header for the end."""
    with open_file(path) as file:
        size = os.path.getsize(path) if file.seekable() and path.suffix == ".tar" else None
        try:
            archive = tarfile.open(fileobj=file, mode="r|", ignore_zeros=True)  # noqa: SIM115  # closed below
        except tarfile.ReadError as exc:
            raise ValueError(f"it is no tar file ({exc})") from None
        expected = 0
        with archive:
            while True:
                try:
                    info = archive.next()
                except tarfile.TarError as exc:
                    yield None, b"", f"it is cut off: {exc}"
                    return
                if info is None:
                    break
                if info.offset > expected + 2 * _BLOCK or (info.offset > expected and not _zeros(path, expected, info)):
                    yield None, b"", f"bytes {expected:,} to {info.offset:,} are no member of a tar"
                expected = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                if info.isfile():
                    yield (info.name.removeprefix("./"), *_read(archive, info))
                archive.members = []  # type: ignore[attr-defined]  # or all headers stay in memory
        if size is not None and size > expected and not _zeros(path, expected, None):
            yield None, b"", f"bytes {expected:,} to {size:,} are no member of a tar"


def _read(archive: tarfile.TarFile, info: tarfile.TarInfo) -> tuple[bytes, str]:
    try:
        file = archive.extractfile(info)
        data = b"" if file is None else file.read()
    except (tarfile.TarError, OSError, EOFError) as exc:
        return b"", f"its bytes cannot be read: {exc}"
    return data, "" if len(data) == info.size else f"it has {len(data):,} bytes of {info.size:,}"


def _zeros(path: Path, start: int, info: tarfile.TarInfo | None) -> bool:
    """Whether a plain tar has only padding there. In a compressed one short gaps are taken for padding."""
    if path.suffix != ".tar":
        return True
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(1 << 16 if info is None else max(0, info.offset - file.tell())):
            if chunk.strip(b"\0"):
                return False
    return True


def decoded(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """A sample as datasets gives it: texts, numbers and JSON decoded, pictures and sounds as bytes."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    result: dict[str, Any] = {}
    for name, value in values.items():
        decode = WebDataset.DECODERS.get(name.rsplit(".", 1)[-1].lower())
        if name == KEY or decode is None:
            result[name] = value
            continue
        try:
            result[name] = decode(value)
        except Exception as exc:
            raise BadRow(f"{where}: {name} does not decode: {' '.join(str(exc).split())}") from None
    return result


def tar_features(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The features of decoded samples, over all of them and not the first few: optional members are columns too."""
    from datasets import Audio, Dataset, Features, Image

    from mldebug.tiny.dataset._media import kind_of_file

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names if kind_of_file(name) is None}
    plain = Dataset.from_dict(columns, on_mixed_types="use_json").features if columns else {}
    kinds = {"image": Image, "audio": Audio}
    return Features({name: plain[name] if name in plain else kinds[str(kind_of_file(name))]() for name in names})


def write_tar(path: Path, taken: Sequence[Taken], fill: Mapping[str, bytes]) -> None:
    """Write samples sorted by key, members in one order and with no time or owner. `fill` has what stands for a member
    that a sample lacks."""
    import io

    order = list(dict.fromkeys(name for row in taken for name in row.values if name != KEY))
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for row in sorted(taken, key=lambda row: str(row.values[KEY])):
            for name in order:
                data = row.values.get(name, fill.get(name))
                if data is not None:
                    info = tarfile.TarInfo(f"{row.values[KEY]}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
