"""How a transformer is built, read off its config: widths, heads, kinds of layers, and which weights are in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.perf.matmul._config import is_known


@dataclass(frozen=True)
class Layout:
    """The sizes that decide the matrix products of a decoder, or of an encoder with a decoder."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    longest: int
    tied: bool
    gated: bool
    fused_qkv: bool
    fused_gate: bool
    encoder_layers: int
    # experts
    moe_layers: int
    experts: int
    top_k: int
    expert_inter: int
    shared_inter: int
    shared_gate: bool
    # latent attention
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    # local attention
    windowed_layers: int
    window: int
    assumed: str

    @property
    def dense_layers(self) -> int:
        """Layers with one MLP that all tokens pass."""
        return self.layers - self.moe_layers


def layout_of(name: str, config: dict[str, Any]) -> Layout:
    """The layout that a config describes; a UsageError for a model whose layers are not known."""
    kind = str(config.get("model_type", ""))
    if kind not in CHECKED and ("rms_norm_eps" not in config or is_known(kind)):
        # Of those that transformers has half are no Llama. Others with this norm usually are one, under another name.
        raise UsageError(f"the layers of {name} ({kind or 'no model_type'}) are not known here", _PLAIN)

    def size(*names: str, default: int = 0) -> int:
        for one in names:
            value = config.get(one)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                return int(value)
        return default

    hidden = size("hidden_size", "n_embd", "d_model", "dim")
    layers = size("num_decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    heads = size("num_attention_heads", "n_head", "num_heads", "n_heads")
    missing = [what for what, value in (("width", hidden), ("layers", layers), ("heads", heads)) if not value]
    if missing:
        raise UsageError(f"the config of {name} names no {' and no '.join(missing)}", _PLAIN)
    if kind in _ONE_KV and config.get("multi_query", True) and not config.get("new_decoder_architecture"):
        kv_heads = 1
    else:
        kv_heads = size("num_key_value_heads", "num_kv_heads", default=heads)
    gated = bool(config.get("is_gated_act")) if kind in _ENCODER_DECODER else kind not in _PLAIN_MLP
    inter = size("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    moe_layers, experts = _experts(config, layers, size)
    expert_inter = size("moe_intermediate_size", "expert_intermediate_size", default=inter)
    shared = size("shared_expert_intermediate_size", default=size("n_shared_experts") * expert_inter)
    windowed, window = _windows(config, layers)
    return Layout(
        model_type=kind,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", "d_kv", default=hidden // heads),
        inter=inter,
        vocab=size("vocab_size"),
        longest=size("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        tied=bool(config.get("tie_word_embeddings", True)),
        gated=gated,
        fused_qkv=kind in _FUSED_QKV,
        fused_gate=kind in _FUSED_GATE,
        encoder_layers=size("num_layers") if kind in _ENCODER_DECODER else 0,
        moe_layers=moe_layers,
        experts=experts if moe_layers else 0,
        top_k=size("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", default=1),
        expert_inter=expert_inter,
        shared_inter=shared if moe_layers else 0,
        shared_gate=bool(moe_layers) and "shared_expert_intermediate_size" in config,
        q_rank=size("q_lora_rank"),
        kv_rank=size("kv_lora_rank"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=size("qk_rope_head_dim"),
        v_dim=size("v_head_dim"),
        windowed_layers=windowed,
        window=window,
        assumed="" if kind in CHECKED else f"layers of {kind or 'a model without model_type'} taken to be as in Llama",
    )


_PLAIN = "give the config of a decoder such as llama, gpt2, qwen3_moe or deepseek_v3, or of a t5"


def _experts(config: dict[str, Any], layers: int, size: Any) -> tuple[int, int]:
    """How many layers have experts, and how many each."""
    experts = size("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts < 2:
        return 0, 0
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return sum(one == "sparse" for one in kinds), experts
    if "first_k_dense_replace" in config:
        return max(0, layers - int(config["first_k_dense_replace"] or 0)), experts
    step = size("decoder_sparse_step", default=1)
    dense = set(config.get("mlp_only_layers") or ())
    return sum((at + 1) % step == 0 and at not in dense for at in range(layers)), experts


def _windows(config: dict[str, Any], layers: int) -> tuple[int, int]:
    """How many layers see a window only, and how wide it is."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or window <= 0 or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return sum(one == "sliding_attention" for one in kinds), window
    return layers, window


_ENCODER_DECODER = frozenset({"t5", "mt5", "umt5"})
_ONE_KV = frozenset({"gpt_bigcode", "falcon"})
# Two layers with an activation between them, and no gate.
_PLAIN_MLP = frozenset({
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "falcon", "mpt", "opt", "phi", "starcoder2",
    "codegen", "nemotron", "persimmon", "biogpt", "gpt_neox_japanese", "arcee", "nanochat", "apertus", "jais2",
})  # fmt: skip
_FUSED_QKV = frozenset({
    "gpt2", "gpt_neox", "gpt_bigcode", "bloom", "falcon", "mpt", "phi3", "codegen", "persimmon", "gpt_neox_japanese",
})  # fmt: skip
_FUSED_GATE = frozenset({"phi3", "glm", "glm4"})
# Types whose operations were counted in the model itself as well, and are equal (tests/benchmarks/flops_by_model.py).
CHECKED = frozenset({
    "apertus", "arcee", "axk1", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone", "exaone4", "falcon", "flex_olmo", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "mellum", "minicpm3",
    "minimax_m2", "ministral3", "mistral", "mixtral", "mpt", "mt5", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "t5", "umt5",
    "vaultgemma", "youtu",
})  # fmt: skip
