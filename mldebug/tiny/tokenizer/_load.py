"""One way to ask every tokenizer the same questions, whichever library loads it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError


@dataclass
class Loaded:
    """A tokenizer that has been loaded: its tokens and what it does with text.

    `ids` has every token, added ones included. `added` are those that are found in the text as they stand, `named`
    the roles such as "bos_token". `pair` encodes two texts, `chat` renders a named template; None where the kind of
    tokenizer has no such thing.
    """

    library: str
    ids: dict[str, int]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    added: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    plain: Callable[[str], list[int]] | None = None  # encode without inserting special tokens
    skipping: Callable[[Sequence[int]], str] | None = None  # decode without special tokens
    pair: Callable[[str, str], tuple[list[int], list[int]]] | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    chat: Callable[[str, list[dict[str, str]]], tuple[str, list[int]]] | None = None
    object: Any = None

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Id -> token."""
        return {id: token for token, id in self.ids.items()}

    @property
    def size(self) -> int:
        return len(self.ids)


def load_transformers(directory: Path, trust_remote_code: bool = False) -> Loaded:
    """The tokenizer as AutoTokenizer gives it. Any failure of the library is an MldebugError."""
    from transformers import AutoTokenizer

    with quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
            if not callable(getattr(tokenizer, "get_vocab", None)):
                raise TypeError(f"a {type(tokenizer).__name__} lists no vocabulary")
            loaded = _from_transformers(tokenizer)
        except Exception as exc:  # whatever the library makes of files that it cannot use
            raise MldebugError(
                f"transformers cannot load the tokenizer in {directory}: {_first_line(exc)}",
                "look at tokenizer_class in tokenizer_config.json, and at model_type in config.json",
            ) from exc
    return loaded


def _from_transformers(tokenizer: Any) -> Loaded:
    templates = tokenizer.chat_template or {}
    templates = {"default": templates} if isinstance(templates, str) else dict(templates)

    def encode(text: str) -> list[int]:
        return _encode(text, True)

    def _encode(text: str, special: bool) -> list[int]:
        return [int(id) for id in tokenizer.encode(text, add_special_tokens=special)]

    def decode(ids: Sequence[int], skip: bool = False) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip))

    def pair(first: str, second: str) -> tuple[list[int], list[int]]:
        out = tokenizer(first, second, return_token_type_ids=True)
        return list(out["input_ids"]), list(out.get("token_type_ids") or [])

    def chat(name: str, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        text = tokenizer.apply_chat_template(
            messages, chat_template=templates[name], tokenize=False, add_generation_prompt=True
        )
        return str(text), _encode(str(text), False)

    pipeline = None
    try:
        _encode("a", True)
    except Exception:  # some want words with boxes, or words already cut
        pipeline = from_backend(copy.deepcopy(tokenizer.backend_tokenizer))
    named = {str(role): str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    added = dict(tokenizer.get_added_vocab())
    ids = dict(tokenizer.get_vocab())
    added.update({token: ids[token] for token in map(str, tokenizer.all_special_tokens) if token in ids})
    return Loaded(
        "transformers",
        ids,
        pipeline.encode if pipeline else encode,
        decode,
        added,
        named,
        plain=pipeline.plain if pipeline else lambda text: _encode(text, False),
        skipping=lambda ids: decode(ids, True),
        pair=pipeline.pair if pipeline else pair,
        templates=templates,
        chat=chat if templates else None,
        object=tokenizer,
    )


def load_tokenizers(path: Path) -> Loaded:
    """A tokenizer.json as the tokenizers library reads it, without the files around it."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        raise MldebugError(
            f"the tokenizers library cannot load {path}: {_first_line(exc)}",
            "save it again with the version of tokenizers that wrote it",
        ) from exc
    return from_backend(tokenizer)


def from_backend(tokenizer: Any) -> Loaded:
    """The same for a tokenizer of the tokenizers library that is in memory already."""
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def pair(first: str, second: str) -> tuple[list[int], list[int]]:
        encoding = tokenizer.encode(first, second)
        return list(encoding.ids), list(encoding.type_ids)

    unknown = getattr(tokenizer.model, "unk_token", None)

    return Loaded(
        "tokenizers",
        dict(tokenizer.get_vocab(with_added_tokens=True)),
        lambda text: list(tokenizer.encode(text).ids),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()},
        {"unk_token": unknown} if isinstance(unknown, str) else {},
        plain=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        skipping=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        pair=pair,
        object=tokenizer,
    )


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines() or [type(exc).__name__]
    return lines[0][:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers about lengths, classes and regexes, which the checks answer."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
