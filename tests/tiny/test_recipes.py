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


# Models

TOKENIZED = ["gpt2", "llama", "bert", "mt5", "mixtral", "llava", "idefics"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Any, Path]]:
    """Each recipe of a model, built once."""
    import sys

    folder = tmp_path_factory.mktemp("models")
    sys.path.insert(0, str(FOLDER))
    try:
        return {
            name: (runpy.run_path(str(FOLDER / f"{name}.py"))["build"](folder / name), folder / name)
            for name in [*TOKENIZED, "fsmt"]
        }
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("name", [*TOKENIZED, "fsmt"])
def test_a_model_is_whole_and_small(models: dict[str, tuple[Any, Path]], name: str) -> None:
    report, folder = models[name]
    assert report.ok, report.text()
    assert report.bytes < 1_000_000 and report.checks["forward"].ok and report.checks["reload"].ok
    assert (folder / "mldebug_recipe.json").exists()


@pytest.mark.parametrize("name", TOKENIZED)
def test_the_tokenizer_fits_the_model(models: dict[str, tuple[Any, Path]], name: str) -> None:
    from transformers import AutoTokenizer

    report, folder = models[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 600 == report.model.get_input_embeddings().weight.shape[0]
    text = "the way of many words"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True).strip() == text


def test_what_each_model_is_for(models: dict[str, tuple[Any, Path]]) -> None:
    from transformers import AutoTokenizer

    moe = models["mixtral"][0].model.config
    assert 1 < moe.num_experts_per_tok < moe.num_local_experts
    sentinels = AutoTokenizer.from_pretrained(models["mt5"][1])
    assert len(sentinels("<extra_id_0> <extra_id_99>").input_ids) == 3
    for name in ("llava", "idefics"):
        assert "through the processor" in models[name][0].checks["forward"].why, name


def test_fsmt_has_the_vocabulary_of_its_size(models: dict[str, tuple[Any, Path]]) -> None:
    import json

    report, folder = models["fsmt"]
    for side in ("src", "tgt"):
        vocabulary = json.loads((folder / f"vocab-{side}.json").read_text())
        assert sorted(vocabulary.values()) == list(range(600)) and report.model.config.vocab_size == 600
        merged = [line.split()[:2] for line in (folder / "merges.txt").read_text().splitlines()]
        assert merged and all("".join(pair) in vocabulary for pair in merged)


def test_a_model_comes_out_the_same(models: dict[str, tuple[Any, Path]], build: Build, tmp_path: Path) -> None:
    build("llava", tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "processor_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (models["llava"][1] / name).read_bytes(), name


def test_each_recipe_is_tested_and_runs_by_its_name(run_python, tmp_path: Path) -> None:
    found = {path.stem for path in FOLDER.glob("*.py") if not path.name.startswith("_")}
    assert found == {*DATASETS, *TOKENIZED, "fsmt"}
    done = run_python(FOLDER / "general-pmd-synthetic.py", tmp_path / "set")
    assert done.returncode == 0 and "100, each made distinct" in done.stdout, done.stderr
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}.py`" in readme for name in found)
