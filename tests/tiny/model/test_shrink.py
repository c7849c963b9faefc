"""Configs are shrunk by the roles of their fields, and stay what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mldebug.core.errors import UsageError
from mldebug.tiny.model._constraints import spread
from mldebug.tiny.model._ids import _assign
from mldebug.tiny.model._roles import role_of
from mldebug.tiny.model._shrink import Shrunk, shrink
from mldebug.tiny.model._source import resolve
from mldebug.tiny.model._widths import width_map

pytest.importorskip("transformers")


def tiny(model_type: str, changes: dict[str, Any] | None = None, **options: Any) -> Shrunk:
    config = copy.deepcopy(resolve(model_type).config)
    config.update(changes or {})
    return shrink(config, **options)


# --- roles


@pytest.mark.parametrize(
    ("name", "value", "role"),
    [
        ("hidden_size", 4096, "hidden"),
        ("intermediate_size", 11008, "width"),
        ("num_attention_heads", 32, "heads"),
        ("num_key_value_heads", 8, "kv"),
        ("head_dim", 128, "head_dim"),
        ("num_hidden_layers", 32, "layers"),
        ("num_kv_shared_layers", 15, None),
        ("vocab_size", 32000, "vocab"),
        ("type_vocab_size", 2, None),
        ("max_position_embeddings", 2048, "positions"),
        ("num_local_experts", 8, "experts"),
        ("num_experts_per_tok", 2, "topk"),
        ("image_token_id", 151655, "id"),
        ("image_size", 224, "image"),
        ("num_channels", 3, None),
        ("patch_size", 14, None),
        ("layer_norm_eps", 1e-5, None),
        ("use_cache", True, None),
        ("depths", [2, 2, 6, 2], "stages"),
    ],
)
def test_role_of_a_field(name: str, value: Any, role: str | None) -> None:
    assert role_of(name, value) == role


# --- attention keeps its kind


@pytest.mark.parametrize(
    ("heads", "kv", "expected"), [(32, 32, (4, 4)), (32, 8, (4, 2)), (28, 4, (4, 2)), (64, 1, (4, 1)), (71, 1, (4, 1))]
)
def test_kind_of_attention_stays(heads: int, kv: int, expected: tuple[int, int]) -> None:
    config = tiny("llama", {"num_attention_heads": heads, "num_key_value_heads": kv}).config
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == expected


def test_kv_heads_follow_heads_that_were_set() -> None:
    config = tiny("mixtral", overrides={"num_attention_heads": 6}).config
    assert config["num_attention_heads"] == 6
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert 1 < config["num_key_value_heads"] < 6


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "qwen3", "gpt_oss", "t5"])
def test_head_size_is_not_left_behind(model_type: str) -> None:
    config = tiny(model_type).config
    size = config.get("head_dim") or config["d_kv"]
    assert size <= 32
    if "query_pre_attn_scalar" in config:
        assert config["query_pre_attn_scalar"] == size


def test_heads_wider_than_the_model_stay_wider() -> None:
    source, config = resolve("gemma").config, tiny("gemma").config
    assert source["head_dim"] * source["num_attention_heads"] > source["hidden_size"]
    assert config["head_dim"] * config["num_attention_heads"] > config["hidden_size"]


def test_latent_attention_keeps_its_sums_and_ranks() -> None:
    config = tiny("deepseek_v3").config
    assert config["qk_head_dim"] == config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    assert config["qk_rope_head_dim"] < config["qk_nope_head_dim"]
    assert 0 < config["kv_lora_rank"] < config["q_lora_rank"]


def test_rotary_sections_fill_half_a_head() -> None:
    config = tiny("qwen2_vl", {}).config
    text = config["text_config"]
    section = text["rope_parameters"].get("mrope_section")
    if section is not None:
        assert sum(section) == text["hidden_size"] // text["num_attention_heads"] // 2
    assert spread([16, 24, 24], 4) == [1, 1, 2] or sum(spread([16, 24, 24], 4)) == 4
    assert spread([24, 20, 20], 8) == [3, 3, 2] or sum(spread([24, 20, 20], 8)) == 8


# --- widths


def test_equal_widths_stay_equal_and_distinct_ones_distinct() -> None:
    mapping = width_map({4096, 1024, 1152}, {11008, 4304, 14336, 4096}, 32)
    assert len(set(mapping.values())) == len(mapping)
    assert [mapping[key] for key in sorted(mapping)] == sorted(mapping.values())
    assert all(mapping[key] % 16 == 0 for key in (1024, 1152, 4096))


def test_widths_of_nested_configs_still_fit() -> None:
    config = tiny("llama4", {}).config
    source = resolve("llama4").config
    vision, old = config["vision_config"], source["vision_config"]
    assert old["projector_input_dim"] == old["projector_output_dim"]
    assert vision["projector_input_dim"] == vision["projector_output_dim"]
    assert len({vision["hidden_size"], config["text_config"]["hidden_size"]}) == 2


def test_hidden_is_an_upper_size() -> None:
    assert tiny("llama", hidden=16).config["hidden_size"] == 16
    assert tiny("llama", hidden=128).config["hidden_size"] == 128
    assert tiny("llama", {"hidden_size": 24, "intermediate_size": 48}, hidden=64).config["hidden_size"] == 24


# --- layers


def test_one_layer_of_each_kind() -> None:
    shrunk = tiny("qwen3_next")
    assert shrunk.config["layer_types"] == ["linear_attention", "full_attention"]
    assert shrunk.config["num_hidden_layers"] == 2
    assert shrunk.layer_map == [0, 3]


def test_dense_and_sparse_layers_both_stay() -> None:
    shrunk = tiny("deepseek_v3")
    assert shrunk.config["first_k_dense_replace"] == 1
    assert shrunk.layer_map == [0, 3]


def test_all_lists_are_cut_by_one_map() -> None:
    shrunk = tiny("gemma3n_text")
    config = shrunk.config
    for name in ("layer_types", "intermediate_size", "activation_sparsity_pattern"):
        assert len(config[name]) == config["num_hidden_layers"]
    source = resolve("gemma3n_text").config
    assert config["layer_types"] == [source["layer_types"][layer] for layer in shrunk.layer_map]
    shared = source["num_hidden_layers"] - source["num_kv_shared_layers"]
    assert config["num_kv_shared_layers"] == sum(layer >= shared for layer in shrunk.layer_map)


def test_layers_that_differ_by_number_are_renumbered() -> None:
    shrunk = tiny("gemma4_text")
    overridden = {int(layer) for layer in resolve("gemma4_text").config["per_layer_config"]}
    assert {shrunk.layer_map[int(layer)] for layer in shrunk.config["per_layer_config"]} <= overridden
    assert len(shrunk.config["per_layer_config"]) >= 1


def test_indexes_of_a_tower_are_renumbered() -> None:
    config = tiny("qwen3_vl").config["vision_config"]
    assert len(config["deepstack_visual_indexes"]) == 3
    assert max(config["deepstack_visual_indexes"]) < config["depth"]


def test_stages_that_features_are_taken_from_stay() -> None:
    config = tiny("depth_anything").config["backbone_config"]
    assert len(config["out_indices"]) == 4
    assert config["num_hidden_layers"] >= 4
    assert config["out_features"] == [f"stage{index}" for index in config["out_indices"]]


def test_number_of_layers() -> None:
    assert tiny("llama", layers=3).config["num_hidden_layers"] == 3
    config = tiny("gemma2", layers=4).config
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 4
    short = tiny("qwen3_next", layers=1)
    assert short.config["layer_types"] == ["linear_attention"]
    assert "2 kinds of layers" in short.notes[0]


# --- ids


def test_ids_fit_and_stay_distinct_and_in_order() -> None:
    shrunk = tiny("qwen2_vl")
    source, config = resolve("qwen2_vl").config, shrunk.config
    names = [name for name in source if name.endswith("_token_id") and isinstance(source[name], int)]
    assert len({config[name] for name in names}) == len({source[name] for name in names})
    assert all(config[name] < config["text_config"]["vocab_size"] for name in names)
    assert sorted(names, key=lambda name: config[name]) == sorted(names, key=lambda name: source[name])


def test_lists_of_ids_are_mapped() -> None:
    config = tiny(
        "llama", {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
    ).config
    assert len(set(config["eos_token_id"])) == 3
    assert max(config["eos_token_id"]) < config["vocab_size"]
    assert config["bos_token_id"] not in config["eos_token_id"]


def test_map_of_a_shrunk_tokenizer_is_used_everywhere() -> None:
    ids = {old: new for new, old in enumerate([0, 1, 2, 32000, *range(300, 400)])}
    shrunk = tiny("llava", {"pad_token_id": 2}, id_map=ids)
    assert shrunk.config["text_config"]["vocab_size"] == len(ids)
    assert shrunk.config["image_token_index"] == ids[32000]


def test_ids_that_leave_no_room_at_the_top() -> None:
    mapping = _assign([0, 1, 254, 255, 9000], 256, None)
    new = {old: mapping.get(old, old) for old in (0, 1, 254, 255, 9000)}
    assert len(set(new.values())) == 5
    assert max(new.values()) < 256


# --- what is set by hand


def test_nested_field_is_merged_and_the_rest_follows() -> None:
    for overrides in ({"text_config.num_hidden_layers": 3}, {"text_config": {"num_hidden_layers": 3}}):
        text = tiny("gemma3", overrides=overrides).config["text_config"]
        assert text["num_hidden_layers"] == len(text["layer_types"]) == 3
        assert text["model_type"] == "gemma3_text"


def test_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"text_config\.num_hiden_layers") as caught:
        tiny("gemma3", overrides={"text_config.num_hiden_layers": 2})
    assert caught.value.hint == "did you mean text_config.num_hidden_layers?"
    with pytest.raises(UsageError) as caught:
        tiny("gemma3", overrides={"num_hidden_layers": 2})
    assert (
        "text_config.num_hidden_layers" in caught.value.hint or "vision_config.num_hidden_layers" in caught.value.hint
    )


def test_config_in_place_of_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="holds fields of its own"):
        tiny("gemma3", overrides={"text_config": 3})


# --- nothing else changes


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "bert", "t5", "mixtral", "llava", "whisper", "qwen3_next", "deepseek_v3"]
)
def test_only_sizes_change(model_type: str) -> None:
    shrunk = tiny(model_type)
    kinds = (int, list, dict)
    assert all(isinstance(old, kinds) and not isinstance(old, bool) for old, _new in shrunk.changes.values())


def test_settings_of_the_source_stay() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    kept = {"tie_word_embeddings": True, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "attention_bias": True}
    config = tiny("llama", {"rope_parameters": rope, "max_position_embeddings": 131072, **kept}).config
    assert {name: config[name] for name in kept} == kept
    new = config["rope_parameters"]
    assert {**new, "original_max_position_embeddings": 8192} == rope
    assert new["original_max_position_embeddings"] < config["max_position_embeddings"]


def test_experts_per_token_are_fewer_than_experts() -> None:
    for model_type in ("mixtral", "qwen3_next", "deepseek_v3", "gpt_oss", "llama4_text"):
        config = tiny(model_type).config
        count = next(
            config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)
        )
        assert 1 <= config["num_experts_per_tok"] < count


def test_groups_of_experts_stay_groups() -> None:
    config = tiny("deepseek_v3").config
    assert 1 < config["n_group"] < config["n_routed_experts"]
    assert config["topk_group"] < config["n_group"]
    assert config["n_routed_experts"] % config["n_group"] == 0


def test_source_is_not_touched() -> None:
    source = resolve("llava").config
    before = copy.deepcopy(source)
    shrink(source)
    assert source == before
