"""Makers for the keywords of few architectures: time series, regions, prompts, whole modalities of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from mldebug.tiny.model.inputs._facts import VISION, Facts

Values = dict[str, Any]
Maker = Callable[[Facts, Values], Any]


# --- time series


def _past(facts: Facts) -> int:
    lags = facts.value("lags_sequence", default=[0]) or [0]
    return facts.number("context_length", "prediction_length", default=32) + int(max(lags))


def _past_values(facts: Facts) -> list[Maker]:
    def single(facts: Facts, _made: Values) -> torch.Tensor:
        size = facts.number("input_size", default=1)
        return facts.floats(facts.batch, _past(facts), *([size] if size > 1 else []))

    def channels(facts: Facts, _made: Values) -> torch.Tensor:
        return facts.floats(facts.batch, _past(facts), facts.number("num_input_channels", "input_size", default=1))

    def listed(facts: Facts, _made: Values) -> list[torch.Tensor]:
        return [facts.floats(_past(facts)) for _ in range(facts.batch)]

    return [channels, single, listed] if facts.value("num_input_channels") else [single, listed, channels]


def _future_values(facts: Facts, _made: Values) -> torch.Tensor:
    size = facts.number("input_size", default=1)
    return facts.floats(
        facts.batch, facts.number("prediction_length", "horizon_length", default=8), *([size] if size > 1 else [])
    )


def _time_features(facts: Facts, steps: int) -> torch.Tensor:
    features = facts.number("num_time_features", default=0) + facts.number("num_dynamic_real_features", default=0)
    return facts.floats(facts.batch, steps, features)


def _categories(facts: Facts, _made: Values) -> torch.Tensor | None:
    sizes = facts.value("cardinality", default=[]) or []
    count = facts.number("num_static_categorical_features")
    return torch.stack([facts.ints(facts.batch, high=int(size)) for size in sizes], dim=-1) if count and sizes else None


def _reals(facts: Facts, _made: Values) -> torch.Tensor | None:
    count = facts.number("num_static_real_features")
    return facts.floats(facts.batch, count) if count else None


# --- decisions


def _steps(width: str) -> Maker:
    return lambda facts, _made: facts.floats(facts.batch, 6, facts.number(width, default=1))


# --- pictures with something beside them


def _patch_sizes(facts: Facts, made: Values) -> torch.Tensor:
    """Rows and columns of patches in each image."""
    image = made.get("pixel_values")
    height, width = image.shape[-2:] if image is not None and image.dim() >= 4 else facts.size
    return torch.tensor([[max(1, height // facts.patch), max(1, width // facts.patch)]] * facts.batch)


def _points(facts: Facts, _made: Values) -> torch.Tensor:
    height, width = facts.size
    return torch.tensor([[[[width / 2, height / 2]]]] * facts.batch, dtype=facts.dtype)


def _patches_with_places(facts: Facts, _made: Values) -> torch.Tensor:
    """Rows of a place (row and column, from 1) and the values of a patch."""
    rows, columns = 4, 4
    values = facts.number("patch_embed_hidden_size") or facts.channels * facts.patch**2
    places = torch.tensor(
        [[row + 1, column + 1] for row in range(rows) for column in range(columns)], dtype=facts.dtype
    )
    return torch.cat([places.expand(facts.batch, -1, -1), facts.floats(facts.batch, rows * columns, values)], dim=-1)


def _image_of(*names: str, scale: int = 1) -> Maker:
    """A second picture, as large as the config part of that name says."""

    def make(facts: Facts, _made: Values) -> torch.Tensor:
        part: dict[str, Any] = next(
            (facts.config_dict[name] for name in names if isinstance(facts.config_dict.get(name), dict)), {}
        )
        side = part.get("image_size") if isinstance(part.get("image_size"), int) else None
        size = (side, side) if side else (facts.size[0] * scale, facts.size[1] * scale)
        return facts.floats(facts.batch, facts.channels, *size)

    return make


def _like(name: str) -> Maker:
    def make(facts: Facts, made: Values) -> Any:
        return facts.floats(*made[name].shape) if name in made else None

    return make


def _image_places(facts: Facts, made: Values) -> torch.Tensor:
    """Marks the places of a text that image embeddings take."""
    ids = made.get("input_ids")
    length = ids.shape[1] if ids is not None else facts.length
    count = min(length - 1, facts.number("latent_query_num", default=4))
    mask = torch.zeros(facts.batch, length, dtype=torch.long)
    mask[:, 1 : 1 + count] = 1
    return mask


def _image_attention(facts: Facts, made: Values) -> torch.Tensor:
    ids = made.get("input_ids")
    return torch.ones(facts.batch, ids.shape[1] if ids is not None else facts.length, 1, dtype=torch.long)


def _tile_ids(facts: Facts, _made: Values) -> torch.Tensor:
    return torch.ones(facts.batch, 1, dtype=torch.long)


def _tile_mask(facts: Facts, _made: Values) -> torch.Tensor:
    return torch.ones(facts.batch, 1, facts.number("max_num_tiles", within=VISION, default=1), dtype=torch.long)


def _cross_mask(facts: Facts, made: Values) -> torch.Tensor | None:
    if "aspect_ratio_ids" not in facts.parameters:
        return None
    ids = made.get("input_ids")
    return torch.ones(
        facts.batch,
        ids.shape[1] if ids is not None else facts.length,
        1,
        facts.number("max_num_tiles", within=VISION, default=1),
        dtype=torch.long,
    )


def _task(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.ints(
        facts.batch,
        facts.number("task_seq_len", default=8),
        high=max(2, facts.number("text_encoder_vocab_size", default=64)),
    )


# --- sound


def _codes(facts: Facts, _made: Values) -> torch.Tensor:
    books = facts.number("num_codebooks", "num_quantizers", "n_codebooks", default=8)
    return facts.ints(facts.batch, books, 8, high=facts.number("audio_vocab_size", "codebook_size", default=16))


def _spectrogram(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, 8, facts.number("num_mel_bins", default=80))


def _speaker(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, facts.number("speaker_embedding_dim", default=512))


def _vocoder_input(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(facts.batch, 16, facts.number("model_in_dim", "num_mel_bins", default=80))


# Keyword -> the shapes that it may have. Those that are None for a model are left out.
MORE: dict[str, Callable[[Facts], list[Maker]]] = {
    "past_values": _past_values,
    "past_time_features": lambda facts: [lambda facts, _made: _time_features(facts, _past(facts))],
    "past_observed_mask": lambda facts: [lambda facts, made: torch.ones_like(made["past_values"])],
    "future_values": lambda facts: [_future_values] if facts.takes("future_time_features") else [],
    "future_time_features": lambda facts: [
        lambda facts, _made: _time_features(facts, facts.number("prediction_length", default=8))
    ],
    "static_categorical_features": lambda facts: [_categories],
    "static_real_features": lambda facts: [_reals],
    "freq": lambda facts: [lambda facts, _made: [torch.zeros(1, dtype=torch.long) for _ in range(facts.batch)]],
    "states": lambda facts: [_steps("state_dim")],
    "actions": lambda facts: [_steps("act_dim"), _action_chunk],
    "rewards": lambda facts: [_steps("none")],
    "returns_to_go": lambda facts: [_steps("none")],
    "timesteps": lambda facts: [lambda facts, _made: torch.arange(6).expand(facts.batch, -1)],
    "state": lambda facts: [
        lambda facts, _made: facts.floats(facts.batch, facts.number("max_state_dim", "state_dim", default=32))
    ],
    "target_sizes": lambda facts: [_patch_sizes],
    "input_points": lambda facts: [_points],
    "input_labels": lambda facts: [lambda facts, _made: torch.ones(facts.batch, 1, 1, dtype=torch.long)],
    "flattened_patches": lambda facts: [_patches_with_places],
    "codebook_pixel_values": lambda facts: [_image_of("image_codebook_config"), _image_of(scale=1)],
    "high_res_pixel_values": lambda facts: [_image_of("high_res_vision_config", "high_res_config")],
    "prompt_pixel_values": lambda facts: [_like("pixel_values")],
    "prompt_masks": lambda facts: [_like("pixel_values")],
    "prompt_depth": lambda facts: [lambda facts, _made: facts.floats(facts.batch, 1, *facts.size).abs()],
    "image_embeds_position_mask": lambda facts: [_image_places],
    "image_attention_mask": lambda facts: [_image_attention] if facts.config.model_type == "idefics" else [],
    "aspect_ratio_ids": lambda facts: [_tile_ids],
    "aspect_ratio_mask": lambda facts: [_tile_mask],
    "cross_attention_mask": lambda facts: [_cross_mask] if facts.takes("aspect_ratio_ids") else [],
    "task_inputs": lambda facts: [_task],
    "classes_input_ids": lambda facts: [lambda facts, _made: facts.ints(2 * facts.batch, 4, high=facts.vocab)],
    "classes_attention_mask": lambda facts: [lambda facts, _made: torch.ones(2 * facts.batch, 4, dtype=torch.long)],
    "tasks_input_ids": lambda facts: [lambda facts, _made: facts.ints(facts.batch, 4, high=facts.vocab)],
    "tasks_attention_mask": lambda facts: [lambda facts, _made: torch.ones(facts.batch, 4, dtype=torch.long)],
    "classes_structure": lambda facts: [lambda facts, _made: torch.tensor([2] * facts.batch)],
    "visual_feats": lambda facts: [
        lambda facts, _made: facts.floats(facts.batch, 4, facts.number("visual_feat_dim", default=64))
    ],
    "visual_pos": lambda facts: [
        lambda facts, _made: facts.floats(facts.batch, 4, facts.number("visual_pos_dim", default=4)).sigmoid()
    ],
    "visual_embeds": lambda facts: [
        lambda facts, _made: facts.floats(facts.batch, 4, facts.number("visual_embedding_dim", default=64))
    ],
    "visual_attention_mask": lambda facts: [lambda facts, _made: torch.ones(facts.batch, 4, dtype=facts.dtype)],
    "is_longer": lambda facts: [lambda facts, _made: torch.zeros(facts.batch, 1, dtype=torch.bool)],
    "user_audio_codes": lambda facts: [_codes],
    "moshi_audio_codes": lambda facts: [_codes],
    "decoder_input_values": lambda facts: [_spectrogram],
    "speaker_embeddings": lambda facts: [_speaker],
    "marks": lambda facts: [lambda facts, _made: torch.tensor([[2, 4]] * facts.batch)],
    "num_options": lambda facts: [lambda facts, _made: torch.tensor([[2, 2]] * facts.batch)],
    "question_type_ids": lambda facts: [lambda facts, _made: torch.tensor([[0, 1]] * facts.batch)],
    "mask": lambda facts: [lambda facts, made: torch.ones(next(iter(made.values())).shape[:2], dtype=torch.bool)],
    "generation_steps": lambda facts: [lambda facts, _made: 1],
    "image_merge_sizes": lambda facts: [lambda facts, _made: torch.tensor([facts.merge] * facts.batch)],
    "mel_spectrogram": lambda facts: [lambda facts, _made: facts.floats(facts.batch, facts.mels, 16)],
    "spectrogram": lambda facts: [_vocoder_input],
    "num_patches": lambda facts: [lambda facts, _made: (facts.size[0] // facts.patch) * (facts.size[1] // facts.patch)],
    "chunk_sample_lengths": lambda facts: [
        lambda facts, made: torch.tensor([made["input_features"].shape[-1]] * len(made["input_features"]))
    ],
    "input_ids_masked": lambda facts: [lambda facts, made: made["input_ids"].clone()],
}

# Of those, the ones that are given wherever a forward takes them, after the common ones.
GIVEN = (
    "high_res_pixel_values",
    "codebook_pixel_values",
    "prompt_pixel_values",
    "prompt_masks",
    "prompt_depth",
    "task_inputs",
    "static_categorical_features",
    "static_real_features",
    "states",
    "actions",
    "rewards",
    "returns_to_go",
    "timesteps",
    "input_points",
    "input_labels",
    "image_embeds_position_mask",
    "image_attention_mask",
    "aspect_ratio_ids",
    "aspect_ratio_mask",
    "cross_attention_mask",
    "visual_feats",
    "visual_pos",
    "visual_embeds",
    "visual_attention_mask",
    "is_longer",
    "user_audio_codes",
    "moshi_audio_codes",
    "decoder_input_values",
    "speaker_embeddings",
    "input_ids_masked",
    "freq",
    "image_merge_sizes",
)


def _action_chunk(facts: Facts, _made: Values) -> torch.Tensor:
    return facts.floats(
        facts.batch, facts.number("chunk_size", default=8), facts.number("max_action_dim", "act_dim", default=32)
    )


# --- by the documentation of the forward


def documented(facts: Facts, name: str) -> list[Maker]:
    """The shape that the doc string of the forward gives for `name`, with its words read as fields of the config."""
    text = type(facts.model).forward.__doc__ or ""
    found = re.search(rf"(?m)^\s*{re.escape(name)} \(`?([^\n]*?)of shape `?\(([^)`]*)\)", text)
    if found is None:
        return []
    whole = "Long" in found[1] or "Int" in found[1] or name.endswith("_ids")
    words = [word.strip() for word in found[2].split(",") if word.strip()]
    yes = "Bool" in found[1] or "mask" in name

    def make(facts: Facts, _made: Values) -> torch.Tensor:
        shape = [_side(facts, word) for word in words]
        if yes:
            return torch.ones(shape, dtype=torch.bool if "Bool" in found[1] else torch.long)
        return facts.ints(*shape, high=min(facts.vocab, 2)) if whole else facts.floats(*shape)

    return [make]


def _side(facts: Facts, word: str) -> int:
    """`batch_size`, `sequence_length // 2`, `config.hidden_size` and their like as a number."""
    height, width = facts.size
    known = {
        "batch_size": facts.batch,
        "sequence_length": facts.length,
        "seq_len": facts.length,
        "text_length": facts.length,
        "num_channels": facts.channels,
        "channels": facts.channels,
        "height": height,
        "width": width,
        "image_size": height,
        "patch_size": facts.patch,
        "num_images": 1,
        "num_frames": 2,
        "max_num_images": 1,
        "num_image_tokens": facts.grid[1] * facts.grid[2],
    }
    total = 1
    for factor in word.split("*"):
        factor = factor.strip().removeprefix("config.").removeprefix("self.config.")
        value = int(factor) if factor.isdecimal() else known.get(factor) or facts.number(factor, default=0)
        total *= value or _by_word(facts, factor)
    return total


def _by_word(facts: Facts, word: str) -> int:
    """A side that no field of the config is named after."""
    if "batch" in word:
        return facts.batch
    if any(part in word for part in ("dim", "hidden", "embed")):
        return facts.number("hidden_size", "d_model", default=4)
    return facts.length if "seq" in word or "len" in word else 4
