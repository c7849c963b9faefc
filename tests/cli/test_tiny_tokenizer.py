"""`mldebug tiny-tokenizer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mldebug.cli import main

pytest.importorskip("transformers")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "words"
    folder.mkdir()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    tokens += [f"{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder


def test_report(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["tiny-tokenizer", str(source), "--vocab-size", "30", "-o", str(out)]) == 0
    text = capsys.readouterr().out
    assert "30 tokens" in text and "5 special tokens, 16 characters" in text.replace("added", "special")
    for check in ("round trip", "special tokens", "chat template", "ids", "reload"):
        assert f"\n{check} " in text
    assert len((out / "vocab.txt").read_text().splitlines()) == 30


def test_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["tiny-tokenizer", str(source), "--vocab_size", "30", "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True and (document["size"], document["floor"], document["source_size"]) == (30, 21, 85)
    assert document["checks"]["ids"]["ok"] is True and document["checks"]["chat template"]["ok"] is None
    assert document["id_map"] == json.loads((out / "id_map.json").read_text())
    assert document["path"] == str(out)


def test_quiet(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny-tokenizer", str(source), "--vocab-size", "30", "-o", str(tmp_path / "out"), "-q"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--vocab-size", "20", "-o", "OUT"], "20 is below the floor of"),
        (["--vocab-size", "0", "-o", "OUT"], "'0' is not a whole number of 1 or more"),
        (["--vocab-size", "30"], "no folder to write the tokenizer to"),
    ],
)
def test_wrong_usage(
    arguments: list[str], words: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    assert main(["tiny-tokenizer", str(source), *arguments]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("mldebug: ") and words in first and second.startswith("hint: ")
    assert not (tmp_path / "out").exists()


def test_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    assert main(["tiny-tokenizer", str(tmp_path), "--vocab-size", "300", "-o", str(tmp_path / "out")]) == 1
    assert "tokenizer.json is no JSON" in capsys.readouterr().err
