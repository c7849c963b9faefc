"""Tiny models, tokenizers and datasets with the build of the big ones, for runs that take seconds.

    from mldebug.tiny import tiny_model
    report = tiny_model("llama", "llama-tiny")

Importing this package loads nothing else: each public name is fetched from its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.core.lazy import lazy_names

if TYPE_CHECKING:
    from mldebug.tiny.dataset._make import TinyDatasetReport, tiny_dataset
    from mldebug.tiny.dataset._pack import PackReport, UnpackReport, pack, unpack
    from mldebug.tiny.model._make import TinyModelReport, tiny_model
    from mldebug.tiny.model.inputs._make import example_inputs
    from mldebug.tiny.tokenizer._make import TinyTokenizerReport, tiny_tokenizer

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
    "PackReport": "mldebug.tiny.dataset._pack",
    "TinyDatasetReport": "mldebug.tiny.dataset._make",
    "TinyModelReport": "mldebug.tiny.model._make",
    "TinyTokenizerReport": "mldebug.tiny.tokenizer._make",
    "UnpackReport": "mldebug.tiny.dataset._pack",
    "example_inputs": "mldebug.tiny.model.inputs._make",
    "pack": "mldebug.tiny.dataset._pack",
    "tiny_dataset": "mldebug.tiny.dataset._make",
    "tiny_model": "mldebug.tiny.model._make",
    "tiny_tokenizer": "mldebug.tiny.tokenizer._make",
    "unpack": "mldebug.tiny.dataset._pack",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
