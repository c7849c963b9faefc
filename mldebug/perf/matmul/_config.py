"""The sizes of a model, from where they are: a folder, a config.json, the hub's cache, a type, a short name."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError, UsageError


def load_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A name and the config that `source` means: a dict, a config object of transformers, a file, a folder, a short
    name such as llama-7b, a repository in the hub's cache, or a model type with its defaults. Nothing is downloaded.

    Of a model of several parts it is the config of the text part. What cannot be found or read is an MldebugError.

        load_config("llama-7b")[1]["hidden_size"]  # 4096
    """
    if isinstance(source, Mapping):
        return _named(dict(source))
    if hasattr(source, "to_dict"):
        return _named(source.to_dict())
    name = os.fspath(source)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return name, _complete(_read(file))
    short = name.lower().replace("_", "-")
    if short in SHORT_NAMES:
        return short, SHORT_NAMES[short]
    if path.is_dir():
        raise UsageError(f"{name} has no config.json", "give the folder of a model")
    if name.endswith(".json") or path.is_absolute() or name.startswith(("./", "../", "~")):
        raise UsageError(f"cannot read {name}: no such file or directory", "give the config.json of a model")
    cached = _cached(name)
    if cached is not None:
        return name, _complete(_read(cached))
    config = _defaults(name)
    if config is None:
        raise UsageError(
            f"no model is called {name!r}: no file, short name, model type or cached repository", _hint(name)
        )
    return name, _text_part(config)


def is_known(model_type: str) -> bool:
    """Whether transformers has a class of its own for this type of model."""
    return _config_class(model_type) is not None


def _named(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return str(config.get("_name_or_path") or config.get("model_type") or "config"), _complete(config)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise MldebugError(
            f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "check its permissions"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise MldebugError(f"{path} is no JSON: {exc}", "is it the config.json of a model, whole?") from exc
    if not isinstance(raw, dict):
        raise MldebugError(f"{path} holds a {type(raw).__name__}", "give a model's config.json")
    return raw


def _complete(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the defaults of its type, which decide what the file leaves out; as it is where transformers
    does not know the type or cannot be imported."""
    defaults = _config_class(str(raw.get("model_type", "")))
    if defaults is None:
        return _text_part(raw)
    try:
        full = defaults.from_dict(dict(raw)).to_dict()
    except Exception as exc:
        lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
        first = 1 if len(lines) > 1 and lines[0].startswith("Class validation error") else 0
        said = " ".join(lines[first : first + 2]) if lines[first].endswith(":") else lines[first]
        raise MldebugError(f"this is no config of a {raw['model_type']}: {said[:200]}", "repair that field") from exc
    return _text_part(full)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    if isinstance(inner, dict) and "hidden_size" not in config:
        return {**inner, "_part": "text"}
    return config


def _config_class(model_type: str) -> Any:
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return None
    return CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 - it loads lazily


def _defaults(model_type: str) -> dict[str, Any] | None:
    found = _config_class(model_type)
    if found is None:
        return None
    try:
        config: dict[str, Any] = found().to_dict()
    except Exception as exc:
        raise MldebugError(f"{model_type} has no defaults that make a model: {exc}", "give a config.json") from exc
    return config


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed, or a name that no repository can have
        return None
    return Path(found) if isinstance(found, str) else None


def _hint(name: str) -> str:
    base = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    near = difflib.get_close_matches(base, SHORT_NAMES, 1, 0.5)
    also = "" if not near else f"did you mean {near[0]}? else "
    return also + "give a config.json, or run once what downloads the model's config"


def _llama(hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 1024,
        "vocab_size": 50257, "tie_word_embeddings": True, **more,
    }  # fmt: skip


_LONG = {"max_position_embeddings": 8192}
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768}

# The published sizes of models that people name in short.
SHORT_NAMES: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000, max_position_embeddings=2048),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000, max_position_embeddings=2048),
    "llama-30b": _llama(6656, 17920, 60, 52, 52, 32000, max_position_embeddings=2048),
    "llama-65b": _llama(8192, 22016, 80, 64, 64, 32000, max_position_embeddings=2048),
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama3-8b": _llama(4096, 14336, 32, 32, 8, 128256, **_LONG),
    "llama3-70b": _llama(8192, 28672, 80, 64, 8, 128256, **_LONG),
    "llama3-405b": _llama(16384, 53248, 126, 128, 8, 128256, **_LONG),
    "llama3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256, **_LONG, head_dim=64, tie_word_embeddings=True),
    "llama3.2-3b": _llama(3072, 8192, 28, 24, 8, 128256, **_LONG, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000, **_LONG, model_type="mistral"),
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 32000, **_EXPERTS),
    "mixtral-8x22b": _llama(6144, 16384, 56, 48, 8, 32768, **_EXPERTS),
    "qwen3-8b": _llama(4096, 12288, 36, 32, 8, 151936, **_LONG, model_type="qwen3", head_dim=128),
    "qwen3-30b-a3b": _llama(
        2048, 6144, 48, 32, 4, 151936, **_LONG, model_type="qwen3_moe", head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "deepseek-v3": _llama(
        7168, 18432, 61, 128, 128, 129280, model_type="deepseek_v3", q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
    ),
    "gemma-7b": _llama(
        3072, 24576, 28, 16, 16, 256000, **_LONG, model_type="gemma", head_dim=256, tie_word_embeddings=True
    ),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt3-175b": _gpt2(12288, 96, 96, n_positions=2048),
}  # fmt: skip
