"""Tiny models, tokenizers and datasets with the build of the big ones, for runs that take seconds.

    from mldebug.tiny import tiny_model
    report = tiny_model("llama", "llama-tiny")

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

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

# Public name -> the module that defines it. Type checkers read the imports above instead.
_HOMES = {
    "PackReport": "mldebug.tiny._pack",
    "TinyDatasetReport": "mldebug.tiny._dataset",
    "TinyModelReport": "mldebug.tiny._model",
    "TinyTokenizerReport": "mldebug.tiny._tokenizer",
    "UnpackReport": "mldebug.tiny._pack",
    "example_inputs": "mldebug.tiny._inputs",
    "pack": "mldebug.tiny._pack",
    "tiny_dataset": "mldebug.tiny._dataset",
    "tiny_model": "mldebug.tiny._model",
    "tiny_tokenizer": "mldebug.tiny._tokenizer",
    "unpack": "mldebug.tiny._pack",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
