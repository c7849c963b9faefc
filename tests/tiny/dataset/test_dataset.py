"""tiny_dataset: every kind of source becomes a small set that datasets loads, with the source untouched."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import json
import lzma
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny import tiny_dataset
from tests.tiny.dataset.kit import facts, load, picture, snapshot, stored, wav, write_lines, write_tar

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """Nothing of a test stays in the user's cache."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()


ROWS = [
    {"text": f"row {i} é", "label": i // 25, "x": None if i % 7 == 0 else i / 2, "tags": ["a"] * (i % 3)}
    for i in range(100)
]


def as_file(folder: Path, kind: str) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    path = folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text(text)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "jsonl.bz2":
        path.write_bytes(bz2.compress(text.encode()))
    elif kind == "jsonl.xz":
        path.write_bytes(lzma.compress(text.encode()))
    elif kind == "jsonl.zst":
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(text.encode())
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "parquet.gz":
        datasets.Dataset.from_list(ROWS).to_parquet(folder / "plain")
        path.write_bytes(gzip.compress((folder / "plain").read_bytes()))
        (folder / "plain").unlink()
    elif kind == "arrow":
        datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(path)
    elif kind == "saved":
        path = folder / "saved"
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "shards":
        path = folder / "shards"
        path.mkdir()
        for shard in range(4):
            rows = datasets.Dataset.from_list(ROWS[25 * shard : 25 * shard + 25])
            rows.to_parquet(path / f"train-{shard:05d}-of-00004.parquet", batch_size=10)
    return path


KINDS = ["jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "json", "parquet", "parquet.gz", "arrow", "saved"]


@pytest.mark.parametrize("kind", [*KINDS, "shards"])
@pytest.mark.parametrize("rows", ["first", "random", "stratified", "cover"])
def test_the_same_rows_from_every_kind_of_source(tmp_path, kind: str, rows: str) -> None:
    source = as_file(tmp_path, kind)
    before = snapshot(tmp_path)
    report = tiny_dataset(source, 8, tmp_path / "tiny", rows=rows, seed=3)
    assert report.ok and report.splits["train"].rows == 8
    indices = report.splits["train"].indices
    assert stored(load(tmp_path / "tiny")) == [ROWS[index] for index in indices]
    assert {name: data for name, data in snapshot(tmp_path).items() if not name.startswith("tiny/")} == before
    if rows == "first":
        assert indices == tuple(range(8))
    elif rows == "random":
        assert indices == tuple(sorted(indices)) and len(set(indices)) == 8 and indices[-1] > 20
    else:
        assert {ROWS[index]["label"] for index in indices} == {0, 1, 2, 3}


def skipping(source: Path, n: int, output: Path, bad: str, **options: Any) -> Any:
    """The report of a source with bad rows, which are an error that names one of them unless they are skipped."""
    with pytest.raises(MldebugError, match=bad) as caught:
        tiny_dataset(source, n, output, **options)
    assert "--skip-bad" in caught.value.hint and not output.exists()
    report = tiny_dataset(source, n, output, skip_bad=True, **options)
    assert any(re.search(bad, text) for text in report.splits["train"].skipped)
    return report


def test_csv_and_text(tmp_path) -> None:
    lines = "".join(f'{i},"a, {i}\nb",{"" if i % 5 == 0 else i / 2}\n' for i in range(40))
    (tmp_path / "a.csv").write_text("id,text,v\n" + lines)
    tiny_dataset(tmp_path / "a.csv", 6, tmp_path / "csv")
    whole = datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train")
    tiny = load(tmp_path / "csv")
    assert tiny.features == whole.features and stored(tiny) == stored(whole)[:6]
    (tmp_path / "a.tsv").write_text("a\tb\n1\tx\n2\ty\n")
    tiny_dataset(tmp_path / "a.tsv", 6, tmp_path / "tsv")
    assert stored(load(tmp_path / "tsv")) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    (tmp_path / "a.txt").write_text("one\n\nthree é")
    tiny_dataset(tmp_path / "a.txt", 5, tmp_path / "txt")
    assert stored(load(tmp_path / "txt")) == [{"text": "one"}, {"text": ""}, {"text": "three é"}]


def test_types_of_tables_pass_through(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.25")], pa.decimal128(9, 2)),
            "when": pa.array([datetime.datetime(2020, 1, 2, 3), None, None], pa.timestamp("ns", tz="UTC")),
            "half": pa.array([1.5, 2.5, None], pa.float32()).cast(pa.float16()),
            "small": pa.array([1, None, 3], pa.int8()),
            "big": pa.array(["a", None, "b"], pa.large_string()),
            "raw": pa.array([b"\0\1", None, b""], pa.binary()),
            "deep": pa.array([[{"a": [1, 2]}], [], None], pa.list_(pa.struct([("a", pa.list_(pa.int16()))]))),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    tiny_dataset(tmp_path / "a.parquet", 3, tmp_path / "tiny")
    again = load(tmp_path / "tiny").with_format("arrow")[:]
    assert again.schema.types == table.schema.types and again.to_pylist() == table.to_pylist()


def test_features_splits_and_card_are_kept(tmp_path) -> None:
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "grid": datasets.Array2D((2, 2), "int32"),
            "pair": datasets.Translation(["de", "en"]),
        }
    )
    rows = {"label": [0, 1] * 10, "grid": [[[1, 2], [3, 4]]] * 20, "pair": [{"de": "ja", "en": "yes"}] * 20}
    data = datasets.Dataset.from_dict(rows, features=features)
    whole = datasets.DatasetDict({"train": data, "validation": data.select(range(15)), "test": data.select(range(3))})
    whole.save_to_disk(tmp_path / "saved")
    report = tiny_dataset(tmp_path / "saved", 5, tmp_path / "one")
    assert {name: split.rows for name, split in report.splits.items()} == {"train": 5, "validation": 5, "test": 3}
    tiny = load(tmp_path / "one", split=None)
    assert set(tiny) == {"train", "validation", "test"} and tiny["train"].features == features
    # The result is a source too, and its card goes along.
    card = (tmp_path / "one" / "README.md").read_text()
    extra = card.replace("---\n", "---\nlicense: mit\ntags: [odd]\n", 1).replace("# one", "# My data\n\nWords.")
    (tmp_path / "one" / "README.md").write_text(extra)
    tiny_dataset(tmp_path / "one", 2, tmp_path / "two", splits=["test", "train"])
    again = load(tmp_path / "two", split=None)
    assert set(again) == {"test", "train"} and again["train"].features == features and len(again["test"]) == 2
    card = (tmp_path / "two" / "README.md").read_text()
    assert "license: mit" in card and "Words." in card and card.count("## This is a tiny version") == 1
    assert "num_examples: 2" in card and "num_examples: 5" not in card and "n<1K" in card


# Pictures and sounds


def test_pictures_that_are_paths_become_bytes_and_small(tmp_path) -> None:
    kinds = [("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("I;16", "PNG")]
    kinds += [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "WEBP"), ("P", "GIF"), ("RGB", "BMP")]
    kinds += [("RGB", "TIFF"), ("CMYK", "TIFF")]
    (tmp_path / "files").mkdir()
    paths = []
    for number, (mode, form) in enumerate(kinds):
        path = tmp_path / "files" / f"{number}.{form.lower()}"
        path.write_bytes(picture(mode, form))
        paths.append(str(path))
    image = datasets.Image()
    features = datasets.Features(
        {"image": image, "many": datasets.List(image), "deep": [{"shot": image, "name": datasets.Value("string")}]}
    )
    rows = {
        "image": [*paths, None],
        "many": [[path, None, paths[0]] for path in paths] + [[]],
        "deep": [[{"shot": path, "name": "x"}] for path in paths] + [None],
    }
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    tiny_dataset(tmp_path / "saved", 100, tmp_path / "tiny")
    for path in (tmp_path / "files").iterdir():
        path.unlink()  # the bytes are in the result
    tiny = load(tmp_path / "tiny")
    assert tiny.features["image"] == image and len(tiny) == len(kinds) + 1
    for row, (mode, form) in zip(stored(tiny), kinds, strict=False):
        for file in (row["image"], row["many"][0], row["deep"][0]["shot"]):
            assert facts(file["bytes"]) == (form, mode, (32, 19))
        assert row["many"][1] is None and "/" not in row["image"]["path"]
    assert tiny[len(kinds)] == {"image": None, "many": [], "deep": None}
    assert tiny[0]["image"].size == (32, 19)


def test_small_pictures_are_not_written_anew_and_moving_ones_still_move(tmp_path) -> None:
    import io

    from PIL import Image

    small = picture("RGB", "JPEG", (20, 32))
    frames = [Image.new("RGB", (64, 64), color) for color in ("red", "green", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    turned = Image.new("RGB", (200, 100))
    exif = Image.Exif()
    exif[0x0112] = 6
    other = io.BytesIO()
    turned.save(other, "JPEG", exif=exif)
    rows = [{"image": {"bytes": data, "path": None}} for data in (small, buffer.getvalue(), other.getvalue())]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    tiny_dataset(tmp_path / "a.parquet", 3, tmp_path / "tiny", side=40)
    first, second, third = (row["image"]["bytes"] for row in stored(load(tmp_path / "tiny")))
    assert first == small
    with Image.open(io.BytesIO(second)) as image:
        assert image.n_frames == 2 and image.size == (40, 40)
    with Image.open(io.BytesIO(third)) as image:
        assert image.size == (40, 20) and image.getexif()[0x0112] == 6


def test_pictures_without_features_are_found_by_their_bytes(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = picture("RGB", "PNG")
    struct = {"bytes": data, "path": "/home/someone/x.png"}
    table = pa.table({"a": [data, b"no picture"], "b": [struct, None], "c": [[struct, None], []]})
    pq.write_table(table, tmp_path / "a.parquet")
    tiny_dataset(tmp_path / "a.parquet", 2, tmp_path / "tiny")
    row, other = stored(load(tmp_path / "tiny"))
    assert facts(row["a"])[2] == facts(row["b"]["bytes"])[2] == facts(row["c"][0]["bytes"])[2] == (32, 19)
    assert row["b"]["path"] == "x.png" and other["a"] == b"no picture"


def test_an_imagefolder_keeps_labels_and_names_the_picture_that_does_not_decode(tmp_path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "set" / "train" / label).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "set" / "train" / label / f"{number}.png").write_bytes(picture())
    (tmp_path / "set" / "train" / "cat" / "1.png").write_bytes(b"no picture")
    (tmp_path / "set" / "train" / "cat" / "2.png").write_bytes(picture()[:90])
    skipping(tmp_path / "set", 4, tmp_path / "tiny", r"[12]\.png.*does not decode", rows="stratified")
    tiny = load(tmp_path / "tiny")
    assert tiny.features["label"].names == ["cat", "dog"]
    assert set(tiny["label"]) == {0, 1}
    report = skipping(tmp_path / "set", 4, tmp_path / "first", r"1\.png.*does not decode")
    skipped = report.splits["train"].skipped
    assert len(skipped) == 2 and "1.png" in skipped[0] and "2.png" in skipped[1]
    assert load(tmp_path / "first")["label"] == [0, 1, 1, 1]


def test_an_audiofolder_is_embedded_and_shortened(tmp_path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "long.wav").write_bytes(wav(3.0))
    (tmp_path / "set" / "short.wav").write_bytes(wav(0.5))
    (tmp_path / "set" / "song.mp3").write_bytes(b"\xff\xfb\x90\x00" + bytes(400))
    report = tiny_dataset(tmp_path / "set", 5, tmp_path / "tiny")
    data = {row["audio"]["path"]: row["audio"]["bytes"] for row in stored(load(tmp_path / "tiny"))}
    assert data["short.wav"] == wav(0.5) and data["song.mp3"] == (tmp_path / "set" / "song.mp3").read_bytes()
    import io
    import wave

    with wave.open(io.BytesIO(data["long.wav"])) as short, wave.open(io.BytesIO(wav(3.0))) as long:
        assert short.getparams()[:3] == long.getparams()[:3] and short.getnframes() == 8000
        assert short.readframes(8000) == long.readframes(8000)
    assert any("full length" in note for note in report.splits["train"].notes)


def test_metadata_of_an_imagefolder_comes_along(tmp_path) -> None:
    (tmp_path / "set").mkdir()
    for number in range(2):
        (tmp_path / "set" / f"{number}.png").write_bytes(picture())
    write_lines(tmp_path / "set" / "metadata.jsonl", [{"file_name": f"{n}.png", "caption": f"c{n}"} for n in range(2)])
    tiny_dataset(tmp_path / "set", 2, tmp_path / "tiny")
    assert load(tmp_path / "tiny")["caption"] == ["c0", "c1"]


# Nothing of the whole is carried along


def test_the_result_is_small_however_it_is_sent(tmp_path) -> None:
    whole = datasets.Dataset.from_dict({"text": [f"{i} " * 2000 for i in range(500)]})
    whole.save_to_disk(tmp_path / "saved")
    for rows in ("first", "random"):
        report = tiny_dataset(tmp_path / "saved", 3, tmp_path / rows, rows=rows)
        assert report.bytes < 60_000
        assert len(pickle.dumps(load(tmp_path / rows))) < 60_000


def test_rows_taken_from_a_table_do_not_hold_it(tmp_path) -> None:
    from mldebug.tiny.dataset._media import Shrinker
    from mldebug.tiny.dataset._source import open_source

    datasets.Dataset.from_dict({"text": ["x" * 1000] * 2000}).to_parquet(tmp_path / "a.parquet")
    reader = open_source(tmp_path / "a.parquet").splits["train"]
    taken = Shrinker(reader.features, 32).take(next(iter(reader.rows())))
    assert len(pickle.dumps(taken.table)) < 5000
    assert sum(buffer.size for buffer in taken.table.column("text").chunk(0).buffers() if buffer) < 5000


# Bad input


def broken(folder: Path, kind: str) -> Path:
    good = [{"a": i} for i in range(20)]
    path = folder / "data.jsonl"
    if kind == "missing":
        return folder / "dota.jsonl"
    if kind == "empty file":
        path.write_text("")
    elif kind == "only blank lines":
        path.write_text("\n\n \n")
    elif kind == "all lines broken":
        path.write_text("{\n{\n")
    elif kind == "no objects":
        path.write_text("1\n2\n")
    elif kind == "unknown ending":
        path = folder / "data.xyz"
        path.write_text("x")
    elif kind == "empty folder":
        path = folder / "nothing"
        path.mkdir()
    elif kind == "folder without data":
        path = folder / "code"
        path.mkdir()
        (path / "a.cpp").write_text("int x;")
    elif kind == "no parquet":
        path = folder / "a.parquet"
        path.write_text("this is no parquet")
    elif kind == "no arrow":
        path = folder / "a.arrow"
        path.write_text("this is no arrow file")
    elif kind == "no tar":
        path = folder / "a.tar"
        path.write_bytes(b"no tar at all" * 100)
    elif kind == "no gzip":
        path = folder / "a.jsonl.gz"
        path.write_bytes(b"no gzip")
    elif kind == "half saved":
        path = folder / "saved"
        datasets.Dataset.from_list(good).save_to_disk(path)
        next(path.glob("*.arrow")).unlink()
    elif kind == "no rows":
        path = folder / "a.parquet"
        datasets.Dataset.from_dict({"a": []}).to_parquet(path)
    elif kind == "numbers too large":
        path.write_text('{"a": 123456789012345678901234567890}\n')
    elif kind == "not utf-8":
        path = folder / "a.txt"
        path.write_bytes(b"\xff\xfe\n")
    return path


BROKEN = ["missing", "empty file", "only blank lines", "all lines broken", "no objects", "unknown ending"]
BROKEN += ["empty folder", "folder without data", "no parquet", "no arrow", "no tar", "no gzip", "half saved"]
BROKEN += ["no rows", "not utf-8"]


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("rows", ["first", "random", "cover"])
def test_a_bad_source_is_one_clear_error_and_nothing_is_written(tmp_path, kind: str, rows: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    source = broken(tmp_path / "in", kind)
    before = snapshot(tmp_path)
    with pytest.raises(MldebugError) as caught:
        tiny_dataset(source, 5, tmp_path / "out" / "tiny", rows=rows)
    assert caught.value.message and caught.value.hint and "\n" not in caught.value.message + caught.value.hint
    assert snapshot(tmp_path) == before and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"n": -1}, {"rows": "last"}, {"side": 0}, {"format": "zip"}, {"max_rows": 0}, {"splits": ["dev"]}],
    ids=str,
)
def test_wrong_arguments_are_usage_errors(tmp_path, options: dict[str, Any]) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": 1}])
    with pytest.raises(UsageError):
        tiny_dataset(**{"source": source, "n": 5, "output": tmp_path / "tiny", **options})
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_folder_of_the_result(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": 1}])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    for force in (False, True):
        with pytest.raises(UsageError):
            tiny_dataset(source, 1, tmp_path / "mine", force=force)
    with pytest.raises(UsageError, match="no folder"):
        tiny_dataset(source, 1, tmp_path / "none" / "tiny")
    tiny_dataset(source, 1, tmp_path / "tiny")
    with pytest.raises(UsageError, match="not empty"):
        tiny_dataset(source, 1, tmp_path / "tiny")
    tiny_dataset(write_lines(tmp_path / "b.jsonl", [{"b": 1}]), 1, tmp_path / "tiny", force=True)
    assert load(tmp_path / "tiny").column_names == ["b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "mine", "tiny"]


def test_bad_rows_among_good_ones_are_named(tmp_path) -> None:
    lines = [json.dumps({"a": i}) for i in range(20)]
    lines[3] = '{"a": '
    lines[5] = "[1, 2]"
    lines[7] = '{"a": "\\ud800"}'
    lines[9] = ""
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for rows in ("first", "random", "cover"):
        report = skipping(tmp_path / "a.jsonl", 50, tmp_path / rows, "a.jsonl:4: .*", rows=rows)
        assert [row["a"] for row in stored(load(tmp_path / rows))] == [i for i in range(20) if i not in (3, 5, 7, 9)]
        assert [text.split(": ")[0] for text in report.splits["train"].skipped] == [
            "a.jsonl:4", "a.jsonl:6", "a.jsonl:8",
        ]  # fmt: skip
    (tmp_path / "b.csv").write_text("a,b\n1,2\n3\n4,5\n6,7,8\n")
    report = skipping(tmp_path / "b.csv", 5, tmp_path / "csv", "b.csv:3: 1 fields")
    assert stored(load(tmp_path / "csv")) == [{"a": 1, "b": 2}, {"a": 4, "b": 5}]
    assert [text.split(": ")[0] for text in report.splits["train"].skipped] == ["b.csv:3", "b.csv:5"]


def test_a_bad_row_is_seen_while_labels_are_read(tmp_path) -> None:
    lines = [json.dumps({"text": str(i), "label": i % 2}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:9], '{"text": ', *lines[9:]]))
    report = skipping(tmp_path / "a.jsonl", 20, tmp_path / "tiny", "a.jsonl:10: no JSON", rows="stratified")
    assert report.splits["train"].rows == 20 and len(report.splits["train"].skipped) == 1


def test_a_file_that_breaks_off_gives_what_is_before(tmp_path) -> None:
    data = gzip.compress("".join(json.dumps({"a": i}) + "\n" for i in range(50_000)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    report = tiny_dataset(tmp_path / "a.jsonl.gz", 5, tmp_path / "one")
    assert not report.splits["train"].skipped
    skipping(tmp_path / "a.jsonl.gz", 5, tmp_path / "two", "a.jsonl.gz", rows="random")
    (tmp_path / "set").mkdir()
    for shard in range(3):
        datasets.Dataset.from_dict({"a": [shard] * 10}).to_parquet(tmp_path / "set" / f"train-{shard}.parquet")
    (tmp_path / "set" / "train-1.parquet").write_bytes(b"broken")
    for rows in ("first", "cover", "random"):
        skipping(tmp_path / "set", 30, tmp_path / f"set-{rows}", "train-1.parquet", rows=rows)
        assert sorted(set(load(tmp_path / f"set-{rows}")["a"])) == [0, 2]


def test_a_file_that_is_corrupt_inside_gives_what_is_before(tmp_path) -> None:
    text = "".join(json.dumps({"a": i, "b": str(i * 7919)}) + "\n" for i in range(120_000)).encode()
    for ending, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)):
        data = bytearray(compress(text))
        data[len(data) // 2 : len(data) // 2 + 200] = b"\x55" * 200
        path = tmp_path / f"a.jsonl.{ending}"
        path.write_bytes(data)
        report = tiny_dataset(path, 5, tmp_path / f"{ending}-first")
        assert report.splits["train"].rows == 5
        skipping(path, 5, tmp_path / f"{ending}-all", path.name, rows="random")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "jsonl.gz", "tar", "csv"])
def test_corrupt_bytes_never_end_in_a_traceback(tmp_path, kind: str) -> None:
    """Bytes are changed at random: there is a set that loads, or one clear error; never half of a folder."""
    import random
    import shutil

    (tmp_path / "in").mkdir()
    if kind == "tar":
        samples = [(f"{i:03d}", {"jpg": picture("RGB", "JPEG"), "txt": b"x", "json": b"{}"}) for i in range(9)]
        source = write_tar(tmp_path / "in" / "a.tar", samples)
    elif kind == "csv":
        source = tmp_path / "in" / "a.csv"
        source.write_text("a,b\n" + '1,"x, y"\n' * 50)
    else:
        source = as_file(tmp_path / "in", kind)
    whole = snapshot(tmp_path / "in")
    for seed in range(25):
        rng = random.Random(f"{kind} {seed}")
        name = rng.choice([name for name in whole if "." in name])
        data = bytearray(whole[name])
        for _ in range(rng.randint(1, 10)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "in" / name).write_bytes(data[: rng.choice((None, None, len(data) // 2))])
        try:
            rows, skip_bad = rng.choice(["first", "random", "cover"]), rng.random() < 0.7
            tiny_dataset(source, 5, tmp_path / "tiny", rows=rows, skip_bad=skip_bad)
            assert len(load(tmp_path / "tiny")) > 0
            shutil.rmtree(tmp_path / "tiny")
        except MldebugError as exc:
            assert "\n" not in exc.message and exc.hint
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        (tmp_path / "in" / name).write_bytes(whole[name])


def test_a_folder_with_several_configurations(tmp_path) -> None:
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "a.jsonl", [{"a": 1}])
    write_lines(tmp_path / "set" / "b.jsonl", [{"b": 2}])
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(MldebugError) as caught:
        tiny_dataset(tmp_path / "set", 1, tmp_path / "no")
    assert "--config" in caught.value.hint
    tiny_dataset(tmp_path / "set", 1, tmp_path / "tiny", config="b")
    assert datasets.load_dataset(str(tmp_path / "tiny"), "b", split="train")[0] == {"b": 2}
    assert load(tmp_path / "tiny")[0] == {"b": 2}
    with pytest.raises(MldebugError):
        tiny_dataset(tmp_path / "set", 1, tmp_path / "no", config="c")


def test_splits_that_differ_load_together(tmp_path) -> None:
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "test.jsonl", [{"a": 1, "label": None}] * 3)
    write_lines(tmp_path / "set" / "train.jsonl", [{"a": 2, "label": 5, "more": "x"}] * 3)
    tiny_dataset(tmp_path / "set", 2, tmp_path / "tiny")
    both = load(tmp_path / "tiny", split=None)
    assert both["test"][0] == {"a": 1, "label": None, "more": None} and both["train"][0]["more"] == "x"
    write_lines(tmp_path / "set" / "test.jsonl", [{"a": {"b": 1}}])
    with pytest.raises(MldebugError, match="split"):
        tiny_dataset(tmp_path / "set", 2, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_sounds_that_are_paths_become_bytes(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.wav").write_bytes(wav(2.0))
    feature = datasets.Audio(sampling_rate=8000)
    features = datasets.Features({"audio": feature, "takes": datasets.List(feature)})
    file = {"bytes": None, "path": str(tmp_path / "a.wav")}
    table = pa.table({"audio": [file, None], "takes": [[file, None], []]}, schema=features.arrow_schema)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    pq.write_table(table.replace_schema_metadata(features.arrow_schema.metadata), tmp_path / "paths.parquet")
    for source in ("saved", "paths.parquet"):
        tiny_dataset(tmp_path / source, 2, tmp_path / f"tiny-{source}")
        tiny = load(tmp_path / f"tiny-{source}")
        first, second = stored(tiny)
        assert tiny.features == features and second == {"audio": None, "takes": []}
        assert len(first["audio"]["bytes"]) == len(first["takes"][0]["bytes"]) == len(wav(1.0))
        assert first["audio"]["path"] == "a.wav" and first["takes"][1] is None


def test_pictures_named_by_paths_in_parquet(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "good.png").write_bytes(picture())
    features = datasets.Features({"image": datasets.Image(), "n": datasets.Value("int64")})
    files = [{"bytes": None, "path": path} for path in ("good.png", "gone.png", str(tmp_path / "set" / "good.png"))]
    table = pa.table({"image": files, "n": [0, 1, 2]}, schema=features.arrow_schema)
    for name, metadata in (("features", features.arrow_schema.metadata), ("none", None)):
        pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "set" / "a.parquet")
        make = tiny_dataset if name == "none" else partial(skipping, bad="no file gone.png")
        report = make(tmp_path / "set" / "a.parquet", 3, tmp_path / name)
        rows = stored(load(tmp_path / name))
        assert facts(rows[0]["image"]["bytes"])[2] == facts(rows[-1]["image"]["bytes"])[2] == (32, 19)
        if name == "features":  # without them it may be anything that has a path
            assert report.splits["train"].indices == (0, 2)


def test_a_large_picture_is_let_go_when_it_is_small(tmp_path) -> None:
    from mldebug.tiny.dataset._media import Shrinker
    from mldebug.tiny.dataset._source import open_source

    data = picture("RGB", "BMP", (1000, 1000))
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": [{"bytes": data, "path": None}]}, features=features).to_parquet(
        tmp_path / "a.parquet"
    )
    reader = open_source(tmp_path / "a.parquet").splits["train"]
    taken = Shrinker(reader.features, 32).take(next(iter(reader.rows())))
    assert len(data) > 3_000_000 and len(pickle.dumps(taken)) < 10_000


def test_columns_of_a_csv_file_with_one_name(tmp_path) -> None:
    (tmp_path / "a.csv").write_text("a,a,\n1,2,3\n")
    tiny_dataset(tmp_path / "a.csv", 1, tmp_path / "tiny")
    whole = datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train")
    assert stored(load(tmp_path / "tiny")) == stored(whole)
    (tmp_path / "b.csv").write_text("a,b\n")
    with pytest.raises(MldebugError, match="no rows"):
        tiny_dataset(tmp_path / "b.csv", 1, tmp_path / "no")


def test_a_hub_id_offline_is_said(tmp_path, monkeypatch) -> None:
    with pytest.raises(UsageError, match="offline"):
        tiny_dataset("some/dataset", 5, tmp_path / "tiny", offline=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("rows", ["first", "random", "cover"])
def test_a_dataset_that_is_loaded_already(tmp_path, streamed, rows) -> None:
    image = {"bytes": picture(), "path": None}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    data = datasets.Dataset.from_dict({"image": [image] * 50, "label": [0] * 49 + [1]}, features=features)
    source = data.to_iterable_dataset() if streamed else data
    report = tiny_dataset(
        datasets.IterableDatasetDict({"dev": source}) if streamed else source, 4, tmp_path / "tiny", rows=rows
    )
    tiny = load(tmp_path / "tiny", split=None)["dev" if streamed else "train"]
    assert tiny.features == features and len(tiny) == 4 and report.splits
    assert facts(stored(tiny)[0]["image"]["bytes"])[2] == (32, 19)
    with pytest.raises(UsageError, match="list is no dataset"):
        tiny_dataset([1, 2], 4, tmp_path / "no")


def test_a_hub_id_that_is_in_the_cache_works_offline(tmp_path) -> None:
    (tmp_path / "dataset").mkdir()
    write_lines(tmp_path / "dataset" / "train.jsonl", ROWS)
    load(tmp_path / "dataset")
    cache = datasets.config.HF_DATASETS_CACHE
    (cache / "dataset").rename(cache / "some___dataset")
    next((cache / "some___dataset").iterdir()).rename(cache / "some___dataset" / "default")
    report = tiny_dataset("some/dataset", 5, tmp_path / "tiny", offline=True)
    assert stored(load(tmp_path / "tiny")) == ROWS[:5] and "cache" in report.notes[0]


def test_a_hub_id_without_a_way_to_the_hub_does_not_wait(tmp_path, monkeypatch) -> None:
    import huggingface_hub

    def fails(*_args, **_options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fails)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(MldebugError, match=r"cannot be reached over the network \(no route\)"):
        tiny_dataset("some/dataset", 5, tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_mixed_values_and_missing_keys_in_json(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": 1}, {"a": "x", "b": {"k": [1, "y"]}}, {"b": None}, {"c": 1.5}])
    tiny_dataset(source, 9, tmp_path / "tiny")
    tiny = load(tmp_path / "tiny")
    assert tiny["a"] == [1, "x", None, None] and tiny[1]["b"] == {"k": [1, "y"]} and tiny["c"][3] == 1.5


@pytest.mark.parametrize("pretty", [None, 2])
def test_json_in_one_array_is_read_from_the_front(tmp_path, pretty) -> None:
    rows = [{"a": i, "text": "é\\]},{" * 10, "n": -1.5e3} for i in range(30_000)]
    text = json.dumps(rows, indent=pretty)
    (tmp_path / "a.json").write_text(text)
    report = tiny_dataset(tmp_path / "a.json", 3, tmp_path / "tiny")
    assert stored(load(tmp_path / "tiny")) == rows[:3] and report.splits["train"].seen == 3
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    report = skipping(tmp_path / "cut.json", 30_000, tmp_path / "cut", "broken JSON")
    assert report.splits["train"].rows > 10_000


def test_tar_files_that_are_broken_inside(tmp_path) -> None:
    samples = [(f"{i:04d}", {"txt": f"t{i}".encode() * 600, "cls": str(i).encode()}) for i in range(10)]
    write_tar(tmp_path / "a.tar", samples)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    at = data.index(b"0004.txt")
    data[at : at + 300] = b"\xaa" * 300  # a header
    (tmp_path / "a.tar").write_bytes(data)
    skipping(tmp_path / "a.tar", 50, tmp_path / "tiny", "a.tar")
    keys = load(tmp_path / "tiny")["__key__"]
    assert {"0003", "0005", "0009"} <= set(keys)
    samples[2][1]["cls"] = b"seven"
    write_tar(tmp_path / "b.tar", samples)
    skipping(tmp_path / "b.tar", 50, tmp_path / "cls", "b.tar:0002")
    assert len(load(tmp_path / "cls")) == 9
    whole = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "c.tar").write_bytes(whole[: whole.index(b"0006.txt") + 900])
    skipping(tmp_path / "c.tar", 50, tmp_path / "cut", "c.tar")
    assert "0005" in load(tmp_path / "cut")["__key__"] and "0006" not in load(tmp_path / "cut")["__key__"]
