"""Calls that cannot be meant are one clear error, and reports are short where they are shown."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy
import pytest

from mldebug import MldebugError, tiny, tiny_dataset, tiny_model, tiny_tokenizer
from mldebug.core.errors import UsageError
from mldebug.tiny import example_inputs
from tests.tiny.dataset.kit import write_lines
from tests.tiny.tokenizer import kit


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("tiny_model", {"layer": 2}, "tiny_model() has no argument layer", "did you mean layers?"),
        ("tiny_model", {"vocab_size": 2}, "no argument vocab_size", "did you mean vocab?"),
        ("tiny_model", {"zzz": 2}, "no argument zzz", "its arguments are source, output, layers"),
        ("tiny_model", {"layers": "2"}, "layers is '2', of type str", "give a whole number"),
        ("tiny_model", {"layers": True}, "layers is True, of type bool", "give a whole number"),
        ("tiny_model", {"seed": None}, "seed is None", "give a whole number"),
        ("tiny_model", {"seed": 2**64}, "more than 64 bits", "smaller"),
        ("tiny_model", {"set": "a=b"}, "set is 'a=b', of type str", "give a dict"),
        ("tiny_model", {"budget": 1.5}, "budget is 1.5, of type float", "give a whole number or a text"),
        ("tiny_tokenizer", {"size": 400}, "no argument size", "did you mean vocab_size?"),
        ("tiny_dataset", {"n": 5}, "missing a required argument: 'output'", "tiny_dataset(source, n, output, ...)"),
        ("tiny_dataset", {"n": 5, "output": None}, "output is None", "give a text or a path"),
        ("tiny_dataset", {"n": 5, "output": "x", "skipbad": True}, "no argument skipbad", "did you mean skip_bad?"),
        ("tiny_dataset", {"n": 5, "output": "x", "max_seconds": "1"}, "max_seconds is '1'", "give a number"),
        ("unpack", {"output": "x", "num": 5}, "no argument num", "its arguments are source, output, n"),
        ("pack", {"output": "x", "n": 2.5}, "n is 2.5, of type float", "give a whole number"),
    ],
)
def test_a_wrong_argument_is_named(
    name: str, options: dict[str, Any], message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        getattr(tiny, name)("llama", **options)
    assert message in caught.value.message and hint in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_model_has_no_inputs() -> None:
    for thing in (5, "llama"):
        with pytest.raises(MldebugError, match="is no model of transformers"):
            example_inputs(thing)


def test_the_signature_stays_for_help_and_editors() -> None:
    assert list(inspect.signature(tiny_model).parameters)[:3] == ["source", "output", "layers"]
    assert "architecture of `source`" in (tiny_model.__doc__ or "")


def test_other_kinds_of_numbers_and_dtypes(tmp_path: Path) -> None:
    import torch

    source = write_lines(tmp_path / "a.jsonl", [{"a": 1}] * 3)
    report = tiny_dataset(source, numpy.int64(2), tmp_path / "tiny", splits="train")
    assert report.splits["train"].rows == 2 and len(repr(report)) < 600
    model = tiny_model("llama", layers=numpy.int32(1), dtype=torch.bfloat16)
    assert model.dtype == "bfloat16" and model.model.dtype == torch.bfloat16


def test_reports_are_short_where_they_are_shown(tmp_path: Path) -> None:
    report = tiny_model("llama")
    assert len(repr(report)) < 300 and "LlamaForCausalLM" in repr(report) and "params=" in repr(report)
    kit.byte_bpe(tmp_path / "source", 900)
    made = tiny_tokenizer(tmp_path / "source", 500, tmp_path / "tiny")
    assert len(repr(made)) < 400 and "size=500" in repr(made)
