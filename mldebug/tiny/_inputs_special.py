"""What a few architectures want beside the common inputs, one small function each, by model type."""

from __future__ import annotations

from collections.abc import Callable

from mldebug.tiny._inputs_facts import Facts
from mldebug.tiny._inputs_makers import Values


def _dia(facts: Facts, made: Values) -> None:
    """Several channels of codes, last."""
    decoder = facts.config_dict["decoder_config"]
    made["decoder_input_ids"] = facts.ints(facts.batch, 8, decoder["num_channels"], high=decoder["vocab_size"])


SPECIAL: dict[str, Callable[[Facts, Values], None]] = {"dia": _dia}
