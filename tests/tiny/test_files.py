"""Sources and folders that cannot be: the same two lines from all three builders, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mldebug import MldebugError, tiny_dataset, tiny_model, tiny_tokenizer
from mldebug.core.errors import UsageError
from mldebug.tiny._files import folder_beside
from tests.tiny.dataset.kit import snapshot, write_lines
from tests.tiny.tokenizer import kit


def dataset(source: Any, output: Any, **options: Any) -> Any:
    return tiny_dataset(source, 1, output, **options)


def tokenizer(source: Any, output: Any, **options: Any) -> Any:
    return tiny_tokenizer(source, 400, output, **options)


BUILDERS = pytest.mark.parametrize("make", [tiny_model, dataset, tokenizer], ids=["model", "dataset", "tokenizer"])


@BUILDERS
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("", "the source is empty"),
        ("link", "is a link to nothing"),
        ("pipe", "is neither a file nor a folder"),
        ("x" * 300, "file name too long"),
        ("./gone", "no such file"),
        ("a b", "no such file|no repository can have this name"),
    ],
)
def test_a_source_that_cannot_be(make: Any, kind: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(MldebugError, match=message) as caught:
        make(kind, "out", offline=True)
    assert "\n" not in caught.value.message and caught.value.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.fixture
def sources(tmp_path: Path) -> dict[Any, Path]:
    """What each builder takes, each in a folder of its own."""
    (tmp_path / "data").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "vocab_size": 300, "hidden_size": 64}')
    return {
        tiny_model: tmp_path / "model",
        dataset: write_lines(tmp_path / "data" / "a.jsonl", [{"a": 1}]),
        tokenizer: kit.byte_bpe(tmp_path / "tokenizer", 600),
    }


@BUILDERS
def test_a_folder_that_cannot_be(make: Any, sources: dict[Any, Path], tmp_path: Path) -> None:
    source = sources[make]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    (tmp_path / "file").write_text("x")
    before = snapshot(tmp_path)
    folder = source if source.is_dir() else source.parent
    for output, force, message in (
        (tmp_path / "mine", False, "exists and is not empty"),
        (tmp_path / "mine", True, "is not replaced"),
        (tmp_path / "file", True, "is a file"),
        (tmp_path / "none" / "out", False, "there is no folder"),
        (tmp_path / ("x" * 300), False, "file name too long"),
        (folder, True, "is where the source is"),
        (folder.parent, True, "is where the source is"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            make(source, output, force=force)
        assert "\n" not in caught.value.message and caught.value.hint
        assert snapshot(tmp_path) == before


@BUILDERS
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(make: Any, sources: dict[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(0o555)
    with pytest.raises(MldebugError, match="permission denied"):
        make(sources[make], tmp_path / "locked" / "out")


@BUILDERS
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_source_that_may_not_be_read(make: Any, sources: dict[Any, Path], tmp_path: Path) -> None:
    sources[make].chmod(0)
    with pytest.raises(MldebugError, match=r"cannot read .*: permission denied"):
        make(sources[make], tmp_path / "out")
    sources[make].chmod(0o700)


def test_an_error_of_reading_is_not_taken_for_one_of_writing(tmp_path: Path) -> None:
    for named, message in ((tmp_path / "source" / "x", "cannot read .*source/x"), (None, "cannot write .*out")):
        with pytest.raises(MldebugError, match=message), folder_beside(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", named and str(named))
    assert list(tmp_path.iterdir()) == []


@BUILDERS
def test_force_replaces_what_the_builder_made(make: Any, sources: dict[Any, Path], tmp_path: Path) -> None:
    for force in (False, True):
        make(sources[make], tmp_path / "out", force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model", "out", "tokenizer"]
