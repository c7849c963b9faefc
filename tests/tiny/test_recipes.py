"""Each recipe in tiny/ is rebuilt, from data that it makes itself, and is what its name says."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

datasets = pytest.importorskip("datasets")

FOLDER = Path(__file__).resolve().parents[2] / "tiny"
DATASETS = ["c4-10k", "openwebtext-10k", "oscar-10k", "cm4-synthetic", "general-pmd-synthetic"]
Build = Callable[[str, Path], Any]


@pytest.fixture
def build(monkeypatch, tmp_path_factory) -> Build:
    """`build(name, output)` runs a recipe and returns its report."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, output: Path) -> Any:
        return runpy.run_path(str(FOLDER / f"{name}.py"))["build"](output)

    return run


def rows_of(path: Path) -> Any:
    return datasets.load_dataset(str(path), split="train")


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("c4-10k", {"text": "string", "timestamp": "string", "url": "string"}),
        ("openwebtext-10k", {"text": "string"}),
        ("oscar-10k", {"id": "int64", "text": "string"}),
    ],
)
def test_texts(build: Build, tmp_path: Path, name: str, columns: dict[str, str]) -> None:
    report = build(name, tmp_path / name)
    rows = rows_of(tmp_path / name)
    assert report.ok and len(rows) == 10_000
    assert {column: feature.dtype for column, feature in rows.features.items()} == columns
    assert len(set(rows["text"])) == 10_000 and report.bytes < 20_000_000
    assert name != "oscar-10k" or not "".join(rows["text"][:10]).isascii()


def test_cm4(build: Build, tmp_path: Path) -> None:
    build("cm4-synthetic", tmp_path / "set")
    rows = rows_of(tmp_path / "set")
    assert len(rows) == 100 and set(rows.features) == {"images", "texts", "general_metadata"}
    for row in rows:
        assert len(row["images"]) == len(row["texts"]) > 0
        assert all((image is None) != (text is None) for image, text in zip(row["images"], row["texts"], strict=True))
    seen = {str([row["texts"], [image and image.tobytes() for image in row["images"]]]) for row in rows}
    assert len(seen) == 100


def test_general_pmd(build: Build, tmp_path: Path) -> None:
    build("general-pmd-synthetic", tmp_path / "set")
    rows = rows_of(tmp_path / "set")
    assert len(rows) == 100 and {"image", "text", "source", "meta"} == set(rows.features)
    assert len(set(rows["text"])) == 100 and max(rows[0]["image"].size) == 32


@pytest.mark.parametrize("name", ["cm4-synthetic", "general-pmd-synthetic", "oscar-10k"])
def test_the_same_bytes_each_time(build: Build, tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        build(name, tmp_path / str(number))
    first, again = (next((tmp_path / str(number)).rglob("*.parquet")).read_bytes() for number in (1, 2))
    assert first == again
