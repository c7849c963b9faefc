"""Models are built from shrunk configs: seeded, whole, and with the culprit named where one field breaks the build."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mldebug.tiny.model._build import Built, build, config_of  # noqa: E402
from mldebug.tiny.model._build_class import class_of  # noqa: E402
from mldebug.tiny.model._shrink import Shrunk, shrink  # noqa: E402
from mldebug.tiny.model._source import resolve  # noqa: E402
from mldebug.tiny.model.inputs._make import example_inputs  # noqa: E402


def made(model_type: str, **options: Any) -> Built:
    return build(shrink(resolve(model_type).config), **options)


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("clip", "CLIPModel"),
        ("clip_text_model", "CLIPTextModel"),
    ],
)
def test_class_of_a_type(model_type: str, expected: str) -> None:
    assert class_of(resolve(model_type).config).__name__ == expected


def test_class_that_the_config_or_the_caller_names() -> None:
    config = {**resolve("llama").config, "architectures": ["LlamaForSequenceClassification"]}
    assert class_of(config).__name__ == "LlamaForSequenceClassification"
    assert class_of(config, "AutoModelForCausalLM").__name__ == "LlamaForCausalLM"
    with pytest.raises(UsageError, match="LlamaForCausalML") as caught:
        class_of(config, "LlamaForCausalML")
    assert "LlamaForCausalLM" in caught.value.hint


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "bert", "t5", "mixtral", "llava", "whisper", "qwen3_next", "deepseek_v3"]
)
def test_small_and_runs(model_type: str) -> None:
    model = made(model_type).model
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) * 4 < 1_000_000
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    model(**example_inputs(model))


def test_seed_decides_the_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = made("bert").model, made("bert").model, made("bert", seed=1).model
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    weights = [torch.cat([parameter.flatten() for parameter in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_dtype() -> None:
    assert made("llama", dtype="bfloat16").model.lm_head.weight.dtype == torch.bfloat16
    assert made("llama", dtype="bf16").model.config.dtype == torch.bfloat16
    config = {**resolve("llama").config, "dtype": "float16"}
    assert build(shrink(config)).model.lm_head.weight.dtype == torch.float16
    with pytest.raises(UsageError, match="int8"):
        made("llama", dtype="int8")


def test_ties_are_those_of_the_source() -> None:
    tied = made("gpt2").model
    assert tied.lm_head.weight is tied.transformer.wte.weight
    apart = made("llama").model
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight


def test_reload_is_bit_equal(tmp_path: Path) -> None:
    model = made("t5").model
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, local_files_only=True)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def broken(model_type: str, field: str, value: Any) -> Shrunk:
    """A shrunk config in which one field was shrunk to what cannot be built."""
    shrunk = shrink(resolve(model_type).config)
    config = copy.deepcopy(shrunk.config)
    config[field] = value
    return replace(shrunk, config=config, changes={**shrunk.changes, field: (resolve(model_type).config[field], value)})


def test_shrinking_is_undone_for_the_field_that_broke_the_build() -> None:
    built = build(broken("bit", "num_groups", 7))
    assert built.model.config.num_groups == 32 or "num_groups" in " ".join(built.notes)


def test_culprit_is_named() -> None:
    built = build(broken("bert", "hidden_size", 30))
    assert "hidden_size (30 back to 768)" in built.notes[0]
    assert "hidden_size" not in built.shrunk.changes
    assert built.model.config.num_hidden_layers == 2


def test_source_that_cannot_be_built_says_so() -> None:
    config = copy.deepcopy(resolve("bert").config)
    config["num_attention_heads"] = 7
    with pytest.raises(MldebugError, match="cannot be built at full size either"):
        build(Shrunk(config, {}, [], []))


@pytest.mark.parametrize(("model_type", "field"), [("hunyuan_vl_text", "head_dim"), ("chameleon", "vocabulary_map")])
def test_incomplete_defaults_name_the_missing_field(model_type: str, field: str) -> None:
    with pytest.raises(MldebugError, match="cannot be built at full size either") as caught:
        made(model_type)
    assert field in caught.value.hint
    assert f"config.json of a {model_type} model" in caught.value.hint


def test_full_size_is_only_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoing may not allocate the big model: what is too large is an error that names the field."""
    import mldebug.tiny.model._build as module

    monkeypatch.setattr(module, "LARGEST", 1000)
    with pytest.raises(MldebugError, match="hidden_size") as caught:
        build(broken("bert", "hidden_size", 30))
    assert "--set hidden_size=" in caught.value.hint


def test_config_of_a_plain_config() -> None:
    assert config_of(resolve("llama").config).to_dict()["hidden_size"] == 4096


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class MineConfig(PretrainedConfig):
    model_type = "mine"
    def __init__(self, hidden_size=512, vocab_size=5000, **rest):
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        super().__init__(**rest)

class MineModel(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()
    def forward(self, input_ids=None):
        return self.embed(input_ids)
"""


def test_code_that_comes_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = tmp_path / "mine"
    source.mkdir()
    (source / "code_of_mine.py").write_text(CODE)
    names = {"AutoConfig": "code_of_mine.MineConfig", "AutoModel": "code_of_mine.MineModel"}
    (source / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": names}))
    shrunk = shrink(resolve(source, trust_remote_code=True).config)
    built = build(shrunk, trust_remote_code=True)
    assert type(built.model).__name__ == "MineModel"
    assert tuple(built.model.embed.weight.shape) == (256, 32)
    with pytest.raises(MldebugError, match="code"):
        build(shrunk)
