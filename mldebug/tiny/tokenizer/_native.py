"""Tokenizers that are a file without a config: loaded by the library that the file is for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer._forms import WordsForm
from mldebug.tiny.tokenizer._load import Loaded, from_backend
from mldebug.tiny.tokenizer._ranks import TekkenForm, TiktokenForm
from mldebug.tiny.tokenizer._side import CONFIG, read_object
from mldebug.tiny.tokenizer._spm import CONTROL, UNKNOWN, SpmForm

# How text is cut before merging where the file does not say: as in the newer encodings of tiktoken.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def load_spm(path: Path) -> Loaded:
    """A SentencePiece model by the sentencepiece library. Control pieces are inserted and never found in the text."""
    library = _library("sentencepiece", path)
    form = SpmForm(path)
    try:
        processor = library.SentencePieceProcessor(model_file=str(path))
    except Exception as exc:  # the library raises RuntimeError and others
        raise MldebugError(f"sentencepiece cannot load {path}: {exc}", "is the file complete?") from exc
    special = {piece.text for piece in form.pieces if piece.type in (CONTROL, UNKNOWN)}
    named = form.named()
    before = [processor.bos_id()] if processor.bos_id() >= 0 else []
    after = [processor.eos_id()] if processor.eos_id() >= 0 else []
    ids = form.ids()
    skipped = {ids[token] for token in special}

    def plain(text: str) -> list[int]:
        return list(processor.encode(text))

    def decode(ids: Sequence[int]) -> str:
        return str(processor.decode(list(ids)))

    return Loaded(
        "sentencepiece",
        {processor.id_to_piece(id): id for id in range(processor.get_piece_size())},
        lambda text: [*before, *plain(text), *after],
        decode,
        {token: ids[token] for token in form.added()},
        named,
        plain=plain,
        skipping=lambda ids: decode([id for id in ids if id not in skipped]),
        object=processor,
    )


def load_tiktoken(path: Path) -> Loaded:
    """A tiktoken file by tiktoken, with the special tokens and the pattern of tokenizer_config.json, if any."""
    library = _library("tiktoken", path)
    form = TiktokenForm(path)
    pattern = read_object(path.parent / CONFIG).get("pat_str")
    try:
        encoding = library.Encoding(
            name=path.stem,
            pat_str=pattern if isinstance(pattern, str) else PATTERN,
            mergeable_ranks=dict(form.ranks),
            special_tokens=dict(form.specials),
        )
    except BaseException as exc:  # a panic of its core is no Exception
        if isinstance(exc, (KeyboardInterrupt, SystemExit)):
            raise
        raise MldebugError(f"tiktoken cannot load {path}: {exc}", "does the file have all 256 single bytes?") from exc
    skipped = set(form.specials.values())
    return Loaded(
        "tiktoken",
        form.ids(),
        lambda text: list(encoding.encode(text, allowed_special="all")),
        lambda ids: str(encoding.decode(list(ids))),
        dict(form.specials),
        plain=lambda text: list(encoding.encode(text, disallowed_special=())),
        skipping=lambda ids: str(encoding.decode([id for id in ids if id not in skipped])),
        object=encoding,
    )


def load_tekken(path: Path) -> Loaded:
    """tekken.json by mistral-common, conversations included."""
    _library("mistral_common", path)
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    form = TekkenForm(path)
    try:
        tokenizer: Any = Tekkenizer.from_file(path)
        mistral: Any = MistralTokenizer.from_file(str(path))
    except Exception as exc:  # assertions, pydantic errors and others
        reason = (str(exc).splitlines() or [repr(exc)])[0][:200]
        raise MldebugError(f"mistral-common cannot load {path}: {reason}", "is its version too old?") from exc
    named = {role: token for role, token in _ROLES.items() if token in form.specials}

    def decode(ids: Sequence[int], policy: Any = SpecialTokenPolicy.KEEP) -> str:
        return str(tokenizer.decode(list(ids), special_token_policy=policy))

    def chat(_name: str, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        encoded = mistral.encode_chat_completion(ChatCompletionRequest.model_validate({"messages": messages}))
        return decode(encoded.tokens), list(encoded.tokens)

    return Loaded(
        "mistral-common",
        form.ids(),
        lambda text: list(tokenizer.encode(text, bos=True, eos=True)),
        decode,
        dict(form.specials),
        named,
        plain=lambda text: list(tokenizer.encode(text, bos=False, eos=False)),
        skipping=lambda ids: decode(ids, SpecialTokenPolicy.IGNORE),
        templates={"mistral-common": str(tokenizer.version)},
        chat=chat,
        object=tokenizer,
    )


_ROLES = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def load_words(form: WordsForm, cased: bool) -> Loaded:
    """vocab.json and merges.txt, or vocab.txt, with the pipeline that such files are usually for."""
    return from_backend(words_backend(form, cased))


def words_backend(form: WordsForm, cased: bool) -> Any:
    """The same as a tokenizer of the tokenizers library."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = form.words()
    model = form.model()
    unknown = model.get("unk_token")
    suffix = model.get("end_of_word_suffix")
    if model["type"] == "BPE":
        merges = [(a, b) for a, b in form.merges if a in vocab and b in vocab and a + b in vocab]
        marks = {"unk_token": unknown, "end_of_word_suffix": suffix}
        tokenizer = Tokenizer(models.BPE(vocab, merges, **{key: mark for key, mark in marks.items() if mark}))
        if form.is_byte_level():
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            tokenizer.decoder = decoders.BPEDecoder(suffix=suffix or "</w>")
    elif model["type"] == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unknown or "[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=unknown or "<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    added = sorted(form.added(), key=form.ids().__getitem__)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return tokenizer


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        package = name.replace("_", "-")
        raise MldebugError(f"{path} needs {package}, which is not installed", f"pip install {package}") from exc
