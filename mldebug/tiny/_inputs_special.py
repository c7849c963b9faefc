"""What a few architectures want beside the common inputs, one small function each, by model type."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mldebug.tiny._inputs_facts import Facts
from mldebug.tiny._inputs_makers import Values


def _dia(facts: Facts, made: Values) -> None:
    """Several channels of codes, last."""
    decoder = facts.config_dict["decoder_config"]
    made["decoder_input_ids"] = facts.ints(facts.batch, 8, decoder["num_channels"], high=decoder["vocab_size"])


def _dia_decoder(facts: Facts, made: Values) -> None:
    made["input_ids"] = facts.ints(facts.batch, 8, facts.config.num_channels, high=facts.config.vocab_size)
    made["attention_mask"] = None
    made["encoder_hidden_states"] = facts.floats(facts.batch, 4, facts.config.cross_hidden_size)


def _csm_depth(facts: Facts, made: Values) -> None:
    """One code for each codebook, in order."""
    made["input_ids"] = facts.ints(facts.batch, max(2, facts.config.num_codebooks), high=facts.config.vocab_size)
    made["attention_mask"] = torch.ones_like(made["input_ids"])


def _moshi_depth(facts: Facts, made: Values) -> None:
    _csm_depth(facts, made)
    made["last_hidden_state"] = facts.floats(facts.batch, 1, facts.config.input_size)


def _flava(facts: Facts, made: Values) -> None:
    """Some patches of the picture are masked, and the codebook reads it at its own size."""
    image = made["pixel_values"]
    side = image.shape[-1] // facts.patch
    mask = torch.zeros(facts.batch, side, side, dtype=torch.long)
    mask[:, 0] = 1
    codebook = facts.config_dict.get("image_codebook_config") or {}
    groups = 2 ** (int(codebook.get("num_groups", 4)) - 1)
    made["bool_masked_pos"] = mask
    made["codebook_pixel_values"] = facts.floats(facts.batch, 3, side * groups, side * groups)


SPECIAL: dict[str, Callable[[Facts, Values], None]] = {
    "csm_depth_decoder_model": _csm_depth,
    "dia": _dia,
    "dia_decoder": _dia_decoder,
    "flava": _flava,
    "moshi_depth": _moshi_depth,
}
