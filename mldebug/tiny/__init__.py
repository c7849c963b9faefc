"""Tiny models, tokenizers and datasets with the build of the big ones, for runs that take seconds.

    from mldebug.tiny import tiny_model
    report = tiny_model("llama", "llama-tiny")

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldebug.tiny._dataset import TinyDatasetReport, tiny_dataset
    from mldebug.tiny._inputs import example_inputs
    from mldebug.tiny._model import TinyModelReport, tiny_model
    from mldebug.tiny._pack import PackReport, UnpackReport, pack, unpack
    from mldebug.tiny._tokenizer import TinyTokenizerReport, tiny_tokenizer

__all__ = [
    "PackReport",
    "TinyDatasetReport",
    "TinyModelReport",
    "TinyTokenizerReport",
    "UnpackReport",
    "example_inputs",
    "pack",
    "tiny_dataset",
    "tiny_model",
    "tiny_tokenizer",
    "unpack",
]

# Public name -> the module of this room that defines it. Type checkers read the imports above instead.
_HOMES = {
    "PackReport": "_pack",
    "TinyDatasetReport": "_dataset",
    "TinyModelReport": "_model",
    "TinyTokenizerReport": "_tokenizer",
    "UnpackReport": "_pack",
    "example_inputs": "_inputs",
    "pack": "_pack",
    "tiny_dataset": "_dataset",
    "tiny_model": "_model",
    "tiny_tokenizer": "_tokenizer",
    "unpack": "_pack",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mldebug.tiny.{_HOMES[name]}"), name)
    globals()[name] = value  # the next look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
