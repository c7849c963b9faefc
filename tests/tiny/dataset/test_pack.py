"""unpack and pack: records as folders of files, and sets of any length made of them."""

from __future__ import annotations

import datetime
import decimal
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny import pack, tiny_dataset, unpack
from mldebug.tiny.dataset._pack_unique import draw_number
from tests.tiny.dataset.kit import facts, load, picture, snapshot, stored, wav, write_lines, write_tar

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def multimodal(path: Path) -> Path:
    """Records with pictures and texts in turns, with slots missing here and there."""
    file = {"bytes": picture("RGB", "JPEG"), "path": None}
    image, text = datasets.Image(), datasets.Value("string")
    features = datasets.Features(
        {
            "image": image,
            "text": text,
            "images": datasets.List(image),
            "texts": datasets.List(text),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "meta": {"score": datasets.Value("float32"), "names": datasets.List(text), "shots": [{"shot": image}]},
            "sound": datasets.Audio(),
        }
    )
    rows = [
        {"image": file, "text": "one\n", "images": [file, None, file], "texts": [None, "a", ""], "label": 1,
         "meta": {"score": 0.5, "names": ["x"], "shots": [{"shot": file}, {"shot": None}]}, "sound": None},
        {"image": None, "text": None, "images": [], "texts": None, "label": None, "meta": None, "sound": None},
        {"image": file, "text": "é", "images": None, "texts": [], "label": 0,
         "meta": {"score": None, "names": [], "shots": None}, "sound": None},
    ]  # fmt: skip
    data = datasets.Dataset.from_list(rows, features=features)
    data.to_parquet(path)
    return path


def without_names(value: Any) -> Any:
    """A row without the names of its files, which packing gives anew."""
    if isinstance(value, dict):
        return {key: without_names(item) for key, item in value.items() if key != "path"}
    return [without_names(item) for item in value] if isinstance(value, list) else value


def test_a_record_is_a_folder_of_files(tmp_path) -> None:
    report = unpack(multimodal(tmp_path / "a.parquet"), tmp_path / "records", 3, rows="first")
    assert report.records == 3 and report.ok
    names = sorted(path.name for path in (tmp_path / "records" / "00").iterdir())
    assert names == [
        "image.jpg", "images_00.jpg", "images_01.null", "images_02.jpg", "label.txt", "meta.00.jpg", "meta.json",
        "sound.null", "text.txt", "texts_00.null", "texts_01.txt", "texts_02.txt",
    ]  # fmt: skip
    assert (tmp_path / "records" / "00" / "text.txt").read_text() == "one\n"
    assert (tmp_path / "records" / "00" / "label.txt").read_text() == "yes"
    assert (tmp_path / "records" / "01" / "image.null").read_bytes() == b""
    assert facts((tmp_path / "records" / "00" / "images_02.jpg").read_bytes()) == ("JPEG", "RGB", (32, 19))


def test_there_and_back(tmp_path) -> None:
    source = multimodal(tmp_path / "a.parquet")
    tiny_dataset(source, 3, tmp_path / "tiny")
    unpack(tmp_path / "tiny", tmp_path / "records", 3, rows="first")
    report = pack(tmp_path / "records", tmp_path / "again")
    first, again = load(tmp_path / "tiny"), load(tmp_path / "again")
    assert again.features == first.features and report.rows == 3
    assert without_names(stored(again)) == without_names(stored(first))


def test_values_of_all_types_survive(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "when": pa.array([datetime.datetime(2020, 1, 2, 3, 4, 5), None], pa.timestamp("us")),
            "day": pa.array([datetime.date(2020, 1, 2), None]),
            "span": pa.array([datetime.timedelta(seconds=5), None], pa.duration("us")),
            "price": pa.array([decimal.Decimal("1.25"), None], pa.decimal128(9, 2)),
            "raw": pa.array([b"\0\xff", None]),
            "odd": pa.array([float("inf"), float("-inf")]),
            "half": pa.array([1.5, None], pa.float32()),
            "small": pa.array([1, 2], pa.int8()),
            "flag": pa.array([True, None]),
            "lists": pa.array([[[1, 2], []], None]),
            "days": pa.array([[datetime.date(2020, 1, 2)], []]),
            "a/b": pa.array(["x", "y"]),
            "a_01": pa.array(["p", None]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    unpack(tmp_path / "a.parquet", tmp_path / "records", 2, rows="first")
    pack(tmp_path / "records", tmp_path / "again")
    assert stored(load(tmp_path / "again")) == table.to_pylist()
    assert load(tmp_path / "again").with_format("arrow")[:].schema.types == table.schema.types


def test_folders_that_a_person_made(tmp_path) -> None:
    for number in range(3):
        record = tmp_path / "mine" / f"record {number}"
        record.mkdir(parents=True)
        (record / "text.txt").write_text(f"text {number}")
        (record / ("picture.null" if number == 0 else "picture.png")).write_bytes(b"" if number == 0 else picture())
        (record / "meta.json").write_text(json.dumps({"n": number}))
        for slot in range(number):
            (record / f"parts_{slot:02d}.txt").write_text(f"part {slot}")
        (record / ".DS_Store").write_bytes(b"x")
        (record / "text.txt~").write_text("a backup")
    (tmp_path / "mine" / "record 2" / "sound.wav").write_bytes(wav(0.1))
    pack(tmp_path / "mine", tmp_path / "set")
    made = load(tmp_path / "set")
    assert {name: type(feature).__name__ for name, feature in made.features.items()} == {
        "text": "Value", "picture": "Image", "meta": "dict", "parts": "List", "sound": "Audio",
    } or set(made.features) == {"text", "picture", "meta", "parts", "sound"}  # fmt: skip
    rows = stored(made)
    assert [row["text"] for row in rows] == ["text 0", "text 1", "text 2"] and rows[0]["picture"] is None
    assert rows[2]["parts"] == ["part 0", "part 1"] and rows[2]["meta"] == {"n": 2}
    assert rows[1]["picture"]["bytes"] == picture() and rows[2]["sound"]["bytes"] == wav(0.1)


def test_an_edited_record(tmp_path) -> None:
    unpack(multimodal(tmp_path / "a.parquet"), tmp_path / "records", 3, rows="first")
    record = tmp_path / "records" / "01"
    (record / "image.null").unlink()
    (record / "image.png").write_bytes(picture("L"))
    (record / "label.null").unlink()
    (record / "label.txt").write_text("yes\n")
    shutil.copytree(tmp_path / "records" / "00", tmp_path / "records" / "07")
    pack(tmp_path / "records", tmp_path / "set")
    rows = stored(load(tmp_path / "set"))
    assert len(rows) == 4 and rows[1]["label"] == 1 and facts(rows[1]["image"]["bytes"])[:2] == ("PNG", "L")
    assert without_names(rows[3]) == without_names(rows[0])


# Any length


def test_repeat_goes_round(tmp_path) -> None:
    unpack(write_lines(tmp_path / "a.jsonl", [{"text": f"t{i}"} for i in range(3)]), tmp_path / "records", 3)
    report = pack(tmp_path / "records", tmp_path / "set", 2500)
    assert report.rows == 2500 and report.records == 3
    assert load(tmp_path / "set")["text"] == [f"t{i % 3}" for i in range(2500)]
    pack(tmp_path / "records", tmp_path / "two", 2)
    assert load(tmp_path / "two")["text"] == ["t0", "t1"]
    with pytest.raises(UsageError):
        pack(tmp_path / "records", tmp_path / "no", 4, repeat=False)


@pytest.mark.parametrize("column", ["text", "texts", "number", "picture", "pictures"])
def test_unique_rows_are_all_different(tmp_path, column: str) -> None:
    file = {"bytes": picture("RGB", "JPEG"), "path": None}
    image, text = datasets.Image(), datasets.Value("string")
    kind, value = {
        "text": (text, "hello"),
        "texts": (datasets.List(text), [None, "hello"]),
        "number": (datasets.Value("int64"), 5),
        "picture": (image, file),
        "pictures": (datasets.List(image), [None, file]),
    }[column]
    rows = [{column: value}, {column: value}, {column: None}]
    datasets.Dataset.from_list(rows, features=datasets.Features({column: kind})).to_parquet(tmp_path / "a.parquet")
    unpack(tmp_path / "a.parquet", tmp_path / "records", 3, rows="first")
    pack(tmp_path / "records", tmp_path / "set", 200, unique=True)
    rows = stored(load(tmp_path / "set"))
    assert len(rows) == 200 == len({repr(without_names(row)) for row in rows})
    if "picture" in column:
        import io

        from PIL import Image  # decoded they differ too

        files = [row[column] if column == "picture" else (row[column] or [None, None])[1] for row in rows]
        shown = {Image.open(io.BytesIO(file["bytes"])).tobytes() for file in files if file}
        assert len(shown) == sum(file is not None for file in files) >= 199


@pytest.mark.parametrize(
    ("mode", "form"),
    [("RGB", "PNG"), ("RGB", "JPEG"), ("L", "JPEG"), ("P", "PNG"), ("P", "GIF"), ("1", "PNG"), ("RGBA", "PNG"),
     ("I;16", "PNG"), ("CMYK", "JPEG"), ("RGB", "WEBP")],
)  # fmt: skip
def test_a_number_is_drawn_in_every_mode(mode: str, form: str) -> None:
    data = picture(mode, form, (32, 19))
    drawn = [draw_number(data, number) for number in range(1, 40)]
    assert len(set(drawn)) == 39 and all(facts(file) == (form, mode, (32, 19)) for file in drawn)


def test_what_cannot_be_made_unique_is_said(tmp_path) -> None:
    features = datasets.Features({"label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict({"label": [0, 1]}, features=features).to_parquet(tmp_path / "a.parquet")
    unpack(tmp_path / "a.parquet", tmp_path / "records", 2)
    before = snapshot(tmp_path)
    with pytest.raises(MldebugError, match="distinct"):
        pack(tmp_path / "records", tmp_path / "set", 5, unique=True)
    assert snapshot(tmp_path) == before and not (tmp_path / "set").exists()
    pack(tmp_path / "records", tmp_path / "set", 2, unique=True)


def test_a_tar_is_unpacked_too(tmp_path) -> None:
    samples = [(f"{i:02d}", {"jpg": picture("RGB", "JPEG"), "txt": b"x"}) for i in range(4)]
    samples[2][1]["json"] = b'{"a": 1}'
    unpack(write_tar(tmp_path / "a.tar", samples), tmp_path / "records", 4, rows="first")
    pack(tmp_path / "records", tmp_path / "set", 8)
    assert load(tmp_path / "set")["json"][2] == {"a": 1} and load(tmp_path / "set")["json"][3] is None


# Bad input


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text.json": b"{"}, "one slot|no JSON"),
        ({"image.jpg": b"no picture"}, "image.jpg is no picture"),
        ({"label.txt": b"perhaps"}, "no label 'perhaps'"),
        ({"text.txt": b"\xff"}, "not UTF-8"),
        ({"stranger.txt": b"x"}, "stranger.txt belongs to no column"),
        ({"image.png": b"x"}, "one slot"),
        ({"meta.json": b'{"shots": [{"shot": {"$file": "../../../etc/passwd"}}]}'}, "no file"),
        ({"meta.json": b'{"score": "much"}'}, "meta"),
        ({"../features.json": b"{"}, "features.json"),
    ],
)
def test_a_bad_record_is_named_and_nothing_is_written(tmp_path, change: dict[str, bytes], said: str) -> None:
    unpack(multimodal(tmp_path / "a.parquet"), tmp_path / "records", 1, rows="first")
    for name, data in change.items():
        (tmp_path / "records" / "00" / name).write_bytes(data)
    before = snapshot(tmp_path)
    with pytest.raises(MldebugError, match=said) as caught:
        pack(tmp_path / "records", tmp_path / "set")
    assert caught.value.hint
    assert snapshot(tmp_path) == before and not (tmp_path / "set").exists()


def test_wrong_arguments(tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "00").mkdir(parents=True)
    with pytest.raises(UsageError, match="no such folder"):
        pack(tmp_path / "none", tmp_path / "set")
    with pytest.raises(MldebugError, match="no record folders"):
        pack(tmp_path / "empty", tmp_path / "set")
    with pytest.raises(MldebugError, match="no files"):
        pack(tmp_path / "hollow", tmp_path / "set")
    with pytest.raises(UsageError, match="0 rows"):
        pack(tmp_path / "hollow", tmp_path / "set", 0)
    with pytest.raises(UsageError, match="no such file"):
        unpack(tmp_path / "none.jsonl", tmp_path / "set")
    unpack(write_lines(tmp_path / "a.jsonl", [{"a": "x"}]), tmp_path / "records")
    with pytest.raises(UsageError, match="not empty"):
        unpack(tmp_path / "a.jsonl", tmp_path / "records")
    unpack(tmp_path / "a.jsonl", tmp_path / "records", force=True)
