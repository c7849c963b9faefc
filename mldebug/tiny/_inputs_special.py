"""What a few architectures want beside the common inputs, one small function each, by model type."""

from __future__ import annotations

from collections.abc import Callable

from mldebug.tiny._inputs_facts import Facts
from mldebug.tiny._inputs_makers import Values

SPECIAL: dict[str, Callable[[Facts, Values], None]] = {}
