"""A value for each keyword of a forward, by its name. Where a name has several shapes, all of them in order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mldebug.tiny.model.inputs._audio import features, mask_of, wave_channels, waves
from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._images import (
    Maker,
    Values,
    encoder_states,
    flat_patches,
    grid_thw,
    hidden,
    hidden_last,
    image_mask,
    image_sizes,
    masked_patches,
    patch_grid,
    patch_mask,
    pixel_attention_mask,
    pixel_values,
    plain_image,
    positions_of_patches,
    videos,
)
from mldebug.tiny.model.inputs._more import GIVEN, MORE, documented
from mldebug.tiny.model.inputs._text import (
    boxes,
    decoder_ids,
    input_ids,
    kinds_of_tokens,
    ones_like_ids,
    qformer_ids,
    token_types,
)

# What a forward is given wherever it takes it, in this order.
ALWAYS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_values_images",
    "image_pixel_values",
    "flattened_patches",
    "image_patches",
    "image",
    "input_features",
    "input_values",
    "audio_input_features",
    "past_values",
    "inputs",
    "image_grid_thw",
    "grid_thw",
    "image_grid_hw",
    "image_sizes",
    "target_sizes",
    "spatial_shapes",
    "pixel_attention_mask",
    "pixel_position_ids",
    "image_position_ids",
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "input_values_mask",
    "input_ids",
    "attention_mask",
    "decoder_input_ids",
    "bbox",
    "mm_token_type_ids",
    "qformer_input_ids",
    "past_time_features",
    "past_observed_mask",
    "future_values",
    "future_time_features",
    *GIVEN,
)

# Kept out unless the forward cannot do without: other ways to give the same, and what is for generation.
NEVER = frozenset(
    ("inputs_embeds", "encoder_outputs", "cache", "past_key_values", "labels", "position_ids", "decoder_inputs_embeds")
)


_HIDDEN = ("_embeds", "hidden_states", "_features", "_queries", "_encoding")


def makers_for(facts: Facts, name: str) -> list[Maker]:
    """The shapes that a keyword may have, the likeliest first; none where its name says nothing."""
    found = MAKERS.get(name) or MORE.get(name)
    if found is not None:
        return found(facts)
    return documented(facts, name) or ([hidden] if name.endswith(_HIDDEN) else [])


def _nothing(_facts: Facts, _made: Values) -> None:
    """Left out."""


def _one(maker: Maker) -> Callable[[Facts], list[Maker]]:
    return lambda _facts: [maker]


MAKERS: dict[str, Callable[[Facts], list[Maker]]] = {
    "pixel_values": pixel_values,
    "pixel_values_images": pixel_values,
    "image_pixel_values": pixel_values,
    "pixel_values_videos": videos,
    "image": _one(plain_image),
    "image_grid_thw": _one(grid_thw),
    "grid_thw": _one(grid_thw),
    "video_grid_thw": _one(grid_thw),
    "image_grid_hw": _one(lambda facts, _made: torch.tensor([facts.grid[1:]] * facts.batch)),
    "image_sizes": lambda facts: [image_sizes, _nothing],  # some towers take none, though the forward does
    "spatial_shapes": _one(lambda facts, _made: torch.tensor([patch_grid(facts)] * facts.batch)),
    "pixel_position_ids": _one(positions_of_patches),
    "image_position_ids": _one(positions_of_patches),
    "pixel_attention_mask": lambda facts: [pixel_attention_mask, patch_mask, image_mask],
    "hidden_states": lambda facts: (
        [flat_patches] if facts.takes("grid_thw") else [hidden, hidden_last, plain_image, wave_channels]
    ),
    "encoder_hidden_states": encoder_states,
    "use_cache": _one(lambda _facts, _made: False),
    "query_embeds": _one(hidden),
    "inputs_embeds": _one(hidden),
    "latents": lambda facts: [hidden_last, hidden],
    "merge_sizes": _one(lambda facts, _made: torch.tensor([facts.merge] * facts.batch)),
    "bool_masked_pos": _one(masked_patches),
    "input_features": features,
    "audio_input_features": features,
    "audio_mel": features,
    "input_values": waves,
    "input_features_mask": lambda facts: [mask_of("input_features"), _nothing],
    "feature_attention_mask": _one(mask_of("input_features")),
    "audio_mel_mask": _one(
        lambda facts, made: torch.zeros(made["audio_mel"].shape[:2], dtype=torch.bool)
    ),  # marks padding
    "padding_mask": _one(mask_of("input_values", "input_features", dtype=torch.bool)),
    "input_values_mask": _one(mask_of("input_values")),
    "input_ids": input_ids,
    "attention_mask": _one(ones_like_ids),
    "decoder_input_ids": decoder_ids,
    "bbox": boxes,
    "token_type_ids": _one(token_types),
    "mm_token_type_ids": _one(kinds_of_tokens),
    "qformer_input_ids": _one(qformer_ids),
    "protein_input_ids": _one(lambda facts, _made: facts.ints(facts.batch, 8, high=20, low=4)),
    "protein_attention_mask": _one(lambda facts, _made: torch.ones(facts.batch, 8, dtype=torch.long)),
}

__all__ = ["ALWAYS", "MAKERS", "NEVER", "Maker", "Values", "makers_for"]
