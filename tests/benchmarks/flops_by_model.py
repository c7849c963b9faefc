"""Which types of models are counted right: the operations by rule against those that torch counts in the model itself.

    python tests/benchmarks/flops_by_model.py [--types llama,mixtral]

Builds a small model of each type on the CPU, runs a forward under FlopCounterMode, and prints a line for each. Exit
status 1 if one that is said to be checked differs. About a minute for all.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.perf.matmul._layout import CHECKED
from mldebug.perf.matmul._model import model_shapes

BATCH, SEQ, VOCAB = 2, 16, 330

# Sizes that differ from each other, so that no two products are mistaken for one another.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 160, "d_ff": 160, "ffn_dim": 160,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "num_decoder_layers": 3, "n_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "num_key_value_heads": 2, "d_kv": 24,
    "vocab_size": VOCAB, "moe_intermediate_size": 40, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "sliding_window": 6,
    "shared_expert_intermediate_size": 48, "n_shared_experts": 1,
}  # fmt: skip
OWN_HEAD_DIM = ("llama", "gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe")


def small_config(model_type: str) -> Any:
    """A config of that type with the sizes above, in the fields that it has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    usual = kind().to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in usual or name in kind.attribute_map}
    if model_type in OWN_HEAD_DIM:
        sizes["head_dim"] = 24
    grouped = usual.get("num_key_value_heads") != usual.get("num_attention_heads") or model_type == "llama"
    if "num_key_value_heads" in sizes and not grouped:
        sizes["num_key_value_heads"] = 4
    if isinstance(usual.get("layer_types"), list):
        sizes["layer_types"] = usual["layer_types"][:4]
    if isinstance(usual.get("mlp_layer_types"), list):
        sizes["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    ids = ("pad_token_id", "bos_token_id", "eos_token_id")
    sizes.update({name: 1 for name in ids if isinstance(usual.get(name), int) and usual[name] >= VOCAB})
    return kind(**sizes)


def counted(config: Any, backward: bool = False) -> int:
    """The operations that torch counts in a model of this config, all attention as plain products."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    both = bool(getattr(config, "is_encoder_decoder", False))
    if model_shapes(config).layout.moe_layers:
        config._experts_implementation = "eager"  # the counter knows no grouped products
    model = (AutoModelForSeq2SeqLM if both else AutoModelForCausalLM).from_config(config, attn_implementation="eager")
    ids = torch.randint(3, 300, (BATCH, SEQ))
    extra = {"decoder_input_ids": ids} if both else {}
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, use_cache=False, **extra).logits
        if backward:
            out.float().mean().backward()
    return int(counter.get_total_flops())


def main() -> int:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="these types only, with commas between them")
    types = parser.parse_args().types
    wrong = 0
    for model_type in types.split(",") if types else sorted(CHECKED):
        try:
            config = small_config(model_type)
            ours, torchs = model_shapes(config, seq=SEQ, batch=BATCH).flops(), counted(config)
        except MldebugError as exc:
            print(f"{model_type:<20} {exc.message}")
            continue
        wrong += ours != torchs and model_type in CHECKED
        print(f"{model_type:<20} {ours:14.0f} {torchs:14d} {'equal' if ours == torchs else ours / torchs}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
