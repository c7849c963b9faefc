"""Tars of samples: optional members, order, compression, and loading with webdataset and with datasets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.tiny import tiny_dataset
from tests.tiny.dataset.kit import facts, load, picture, stored, wav, write_tar

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def samples(optional: dict[int, dict[str, bytes]], count: int = 12, reverse: bool = False) -> list[Any]:
    made = [
        (f"{i:04d}", {"jpg": picture("RGB", "JPEG"), "txt": f"t{i}".encode(), **optional.get(i, {})})
        for i in range(count)
    ]
    return made[::-1] if reverse else made


def with_webdataset(folder: Path) -> list[dict[str, Any]]:
    webdataset = pytest.importorskip("webdataset")
    tars = sorted(str(path) for path in folder.rglob("*.tar"))
    return list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))


@pytest.mark.parametrize(
    ("optional", "reverse"),
    [
        ({7: {"json": b'{"a": 1}'}}, False),  # first seen after the samples that features are read from
        ({0: {"json": b'{"a": 1}'}}, False),  # seen first, and not after
        ({7: {"json": b'{"a": 1}'}, 3: {"cls": b"5"}, 11: {"seg.png": picture()}}, True),
        ({i: {"json": b"[1]"} for i in range(0, 12, 2)} | {i: {"cls": b"1"} for i in range(1, 12, 2)}, False),
    ],
    ids=["late", "early", "several", "either"],
)
@pytest.mark.parametrize("rows", ["first", "random", "cover"])
def test_optional_members_are_kept(tmp_path, optional, reverse, rows) -> None:
    source = write_tar(tmp_path / "a.tar", samples(optional, reverse=reverse))
    report = tiny_dataset(source, 12, tmp_path / "tiny", rows=rows)
    loaded = {row["__key__"]: row for row in stored(load(tmp_path / "tiny"))}
    read = with_webdataset(tmp_path / "tiny")
    assert [row["__key__"] for row in read] == sorted(loaded) == [f"{i:04d}" for i in range(12)]
    for row in read:
        number = int(row["__key__"])
        members = {name for name in row if not name.startswith("__")}
        assert members == {"jpg", "txt", *optional.get(number, {})}
        other = loaded[row["__key__"]]
        assert {name for name, value in other.items() if value is not None and name[0] != "_"} == members
        assert facts(row["jpg"]) == ("JPEG", "RGB", (32, 19)) and other["jpg"]["bytes"] == row["jpg"]
    extra = {name for members in optional.values() for name in members}
    assert all(any(name in note for note in report.splits["train"].notes) for name in extra)


def test_cover_takes_a_sample_of_each_pattern(tmp_path) -> None:
    many = samples({150: {"json": b"{}"}, 180: {"cls": b"3"}}, count=200)
    many[120][1]["txt"] = b""
    many[130][1]["jpg"] = picture("L", "JPEG")
    report = tiny_dataset(write_tar(tmp_path / "a.tar", many), 8, tmp_path / "tiny", rows="cover")
    assert {120, 130, 150, 180} <= set(report.splits["train"].indices)
    assert not any(note.startswith("not seen") for note in report.splits["train"].notes)


def test_missing_members_can_be_filled(tmp_path) -> None:
    source = write_tar(tmp_path / "a.tar", samples({7: {"json": b'{"a": 1}', "note.txt": b"x", "cls": b"1"}}))
    tiny_dataset(source, 12, tmp_path / "tiny", fill_missing=True)
    first = with_webdataset(tmp_path / "tiny")[0]
    assert (first["json"], first["note.txt"]) == (b"null", b"") and "cls" not in first
    assert load(tmp_path / "tiny")[0]["note.txt"] == "" and load(tmp_path / "tiny")[0]["json"] is None
    # Without the card too, where everything could be filled.
    source = write_tar(tmp_path / "b.tar", samples({2: {"json": b'{"a": 1}'}}))
    tiny_dataset(source, 12, tmp_path / "filled", fill_missing=True)
    tar = next((tmp_path / "filled").rglob("*.tar"))
    bare = datasets.load_dataset("webdataset", data_files=str(tar), split="train")
    assert [row["a"] if row else None for row in bare["json"]] == [None, None, 1, *[None] * 9]


def test_tars_of_all_sorts(tmp_path) -> None:
    plain = [(f"dir/{i:03d}", {"PNG": picture(), "json": b'{"n": %d}' % i}) for i in range(6)]
    write_tar(tmp_path / "a.tar", plain)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    (tmp_path / "set" / "train").mkdir(parents=True)
    for shard in range(3):
        write_tar(tmp_path / "set" / "train" / f"{shard:05d}.tar", [(f"{shard}{k[4:]}", m) for k, m in plain])
    for number, source in enumerate((tmp_path / "a.tar", tmp_path / "a.tar.gz", tmp_path / "set")):
        for rows, count in (("first", 4), ("random", 4), ("stratified", 6)):
            target = tmp_path / f"{number}-{rows}"
            tiny_dataset(source, count, target, rows=rows, by="json.n" if rows == "stratified" else None)
            read = with_webdataset(target)
            assert len(read) == count and len(load(target)) == count
            for row in read:
                assert facts(row.get("png", row.get("PNG")))[2] == (32, 19)


def test_sounds_in_tars_are_shortened(tmp_path) -> None:
    source = write_tar(tmp_path / "a.tar", [(f"{i}", {"wav": wav(2.0), "txt": b"x"}) for i in range(3)])
    tiny_dataset(source, 3, tmp_path / "tiny")
    assert all(len(row["wav"]) == len(wav(1.0)) for row in with_webdataset(tmp_path / "tiny"))


def test_tars_become_parquet(tmp_path) -> None:
    source = write_tar(tmp_path / "a.tar", samples({7: {"json": b'{"a": 1}'}, 2: {"cls": b"4"}}))
    tiny_dataset(source, 12, tmp_path / "tiny", format="parquet")
    tiny = load(tmp_path / "tiny")
    assert isinstance(tiny.features["jpg"], datasets.Image) and tiny["json"][7] == {"a": 1} and tiny["cls"][2] == 4
    assert facts(stored(tiny)[0]["jpg"]["bytes"])[2] == (32, 19)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match="no webdataset"):
        tiny_dataset(tmp_path / "a.jsonl", 1, tmp_path / "no", format="tar")
