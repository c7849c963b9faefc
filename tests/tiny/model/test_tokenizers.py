"""Tiny models with a tokenizer that is given: the ids of config and generation settings are its ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mldebug.tiny import tiny_model
from tests.tiny.tokenizer import kit

pytest.importorskip("transformers")


def llama(folder: Path, **ids: Any) -> Path:
    folder.mkdir(parents=True)
    sizes = {"vocab_size": 2100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, **sizes, **ids}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({**ids, "suppress_tokens": [2050]}))
    return folder


def configs(folder: Path) -> tuple[Any, Any]:
    config, generation = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    return config, generation


def test_a_list_of_end_ids_stays_a_list(tmp_path: Path) -> None:
    tokenizer = kit.byte_bpe(tmp_path / "tokenizer")
    table = {
        token["content"]: token["id"]
        for token in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    }
    source = llama(
        tmp_path / "model", eos_token_id=[table["<|end|>"], table["<|eot|>"]], bos_token_id=table["<|begin|>"]
    )
    report = tiny_model(source, tmp_path / "tiny", tokenizer=tokenizer)
    assert report.ok, report.text()
    ids = {
        token["content"]: token["id"]
        for token in json.loads((report.path / "tokenizer.json").read_text())["added_tokens"]
    }
    for document in configs(report.path):
        assert document["eos_token_id"] == [ids["<|end|>"], ids["<|eot|>"]]
        assert document["bos_token_id"] == ids["<|begin|>"]


def test_generation_ends_with_the_token_of_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    source = llama(tmp_path / "model", eos_token_id=[2001, 2009], bos_token_id=2000, pad_token_id=2001)
    report = tiny_model(source, tmp_path / "tiny", tokenizer=kit.unigram(tmp_path / "tokenizer"))
    assert report.ok, report.text()
    config, generation = configs(report.path)
    assert (config["bos_token_id"], config["pad_token_id"], config["eos_token_id"]) == (0, 1, 2)
    assert generation["eos_token_id"] == 2
    assert "suppress_tokens" not in generation
