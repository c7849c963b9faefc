"""A new vocabulary from a text, for the pipeline of a tokenizer that is there: the "tiny vocab first" way."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer import _json as documents
from mldebug.tiny.tokenizer._forms import Form, JsonForm, WordsForm
from mldebug.tiny.tokenizer._json import BYTES, byte_characters
from mldebug.tiny.tokenizer._native import PATTERN, words_backend
from mldebug.tiny.tokenizer._ranks import TekkenForm, TiktokenForm
from mldebug.tiny.tokenizer._spm import SpmForm
from mldebug.tiny.tokenizer._vocab import Vocabulary


def train_form(form: Form, vocabulary: Vocabulary, text: Path, size: int) -> Form:
    """The form with a vocabulary of at most `size` tokens learnt from the file `text`.

    What must stay for its role stays: added tokens, special tokens and bytes. Characters are those of the text.
    """
    lines = _lines(text)
    keep = [*vocabulary.required.get("added tokens", []), *vocabulary.required.get("special tokens", [])]
    keep = list(dict.fromkeys(sorted(keep, key=vocabulary.ids.__getitem__)))
    try:
        if isinstance(form, JsonForm):
            return JsonForm(form.path, _train_document(form.document, keep, lines, size))
        if isinstance(form, WordsForm):
            document = json.loads(words_backend(form, form.is_cased()).to_str())
            document = _train_document(document, keep, lines, size)
            model = document["model"]
            return form.with_words(model["vocab"], [(a, b) for a, b in model.get("merges", [])])
        if isinstance(form, SpmForm):
            return _train_spm(form, keep, lines, size)
        if isinstance(form, (TiktokenForm, TekkenForm)):
            pattern = form.document["config"]["pattern"] if isinstance(form, TekkenForm) else PATTERN
            return form.with_tokens(_train_ranks(pattern, lines, size - len(form.specials)))
    except MldebugError:
        raise
    except Exception as exc:  # the trainers raise plain Exception, RuntimeError and others
        reason = (str(exc).strip().splitlines() or [repr(exc)])[0][:200]
        raise MldebugError(
            f"cannot learn {size:,} tokens from {text}: {reason}", "give more text, or ask for fewer tokens"
        ) from exc
    raise MldebugError(f"{form.path.name} cannot be trained", "leave --from-scratch out")


def follow(trained: Form, others: Sequence[Form]) -> tuple[list[Form], list[str]]:
    """The other forms of the folder with the new vocabulary, and the names of those that cannot have it."""
    following: list[Form] = []
    for form in others:
        if isinstance(trained, WordsForm) and isinstance(form, WordsForm):
            following.append(form.with_words(trained.words(), trained.merges))
        elif isinstance(trained, JsonForm) and isinstance(form, WordsForm):
            model = trained.document["model"]
            if isinstance(model["vocab"], dict):
                following.append(form.with_words(trained.ids(), documents.merge_pairs(model)))
    kept = {form.path for form in following}
    return following, [form.path.name for form in others if form.path not in kept]


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as exc:
        raise MldebugError(f"{path} is no UTF-8 text", "--from-scratch takes a plain text file") from exc
    except OSError as exc:
        raise MldebugError(
            f"cannot read {path}: {(exc.strerror or str(exc)).lower()}", "--from-scratch takes a plain text file"
        ) from exc
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise MldebugError(f"{path} has no text in it", "--from-scratch takes a plain text file")
    return lines


def _train_document(document: dict[str, Any], keep: list[str], lines: list[str], size: int) -> dict[str, Any]:
    """tokenizer.json with a model of the same type learnt from the lines; all else is as it was."""
    from tokenizers import Tokenizer

    model, kind = document["model"], documents.model_kind(document)
    byte_level, has_bytes = documents.is_byte_level(document), documents.has_bytes(document)
    fixed = [*keep, *(BYTES if has_bytes else [])]
    bare = {**copy.deepcopy(document), "added_tokens": [], "post_processor": None, "padding": None, "truncation": None}
    bare["model"] = _empty(model, kind)
    tokenizer = Tokenizer.from_str(json.dumps(bare))
    if document.get("pre_tokenizer") is None and documents.SPACE in documents.made_by_pipeline(document):
        from tokenizers import pre_tokenizers

        # Without any cut a line would be one word, and merges would run over spaces.
        tokenizer.pre_tokenizer = pre_tokenizers.Split(documents.SPACE, "merged_with_next")
    alphabet = byte_characters() if byte_level else []
    tokenizer.train_from_iterator(lines, _trainer(model, kind, fixed, alphabet, size))
    learnt = json.loads(tokenizer.to_str())["model"]
    return _with_model(document, learnt, kind, keep)


def _empty(model: dict[str, Any], kind: str) -> dict[str, Any]:
    empty = {key: value for key, value in model.items() if key not in ("vocab", "merges", "unk_id")}
    empty["type"] = kind
    if kind == "Unigram":
        return {**empty, "vocab": [["<unk>", 0.0]], "unk_id": 0}
    return {**empty, "vocab": {}, **({"merges": []} if kind == "BPE" else {})}


def _trainer(model: dict[str, Any], kind: str, fixed: list[str], alphabet: list[str], size: int) -> Any:
    from tokenizers import trainers

    common: dict[str, Any] = {"vocab_size": size, "special_tokens": fixed, "show_progress": False}
    marks = {key: model[key] for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)}
    if kind == "BPE":
        return trainers.BpeTrainer(**common, **marks, initial_alphabet=alphabet, min_frequency=2)
    if kind == "WordPiece":
        return trainers.WordPieceTrainer(**common, **marks, initial_alphabet=alphabet, min_frequency=2)
    if kind == "WordLevel":
        return trainers.WordLevelTrainer(**common)
    unknown = model["vocab"][model["unk_id"]][0] if isinstance(model.get("unk_id"), int) else None
    return trainers.UnigramTrainer(**common, unk_token=unknown, initial_alphabet=alphabet)


def _with_model(document: dict[str, Any], learnt: dict[str, Any], kind: str, keep: list[str]) -> dict[str, Any]:
    """The document around the learnt model. Added tokens that the old model did not have stay outside of the new."""
    model = document["model"]
    outside = set(keep) - documents.model_ids(model).keys()
    tokens = {token: id for token, id in documents.model_ids(learnt).items() if token not in outside}
    new = {key: value for key, value in model.items() if key not in ("vocab", "merges", "unk_id")}
    if kind == "Unigram":
        scores = {piece: score for piece, score in reversed(learnt["vocab"])}
        lowest = min(scores.values())
        scores.update({piece: lowest for piece in BYTES if piece in scores})
        new["vocab"] = [[piece, scores[piece]] for piece in sorted(tokens, key=tokens.__getitem__)]
        unknown = model["vocab"][model["unk_id"]][0] if isinstance(model.get("unk_id"), int) else None
        order = [piece for piece, _ in new["vocab"]]
        new["unk_id"] = order.index(unknown) if unknown in order else None
    else:
        new["vocab"] = tokens
    if "merges" in model:
        new["merges"] = learnt["merges"]
    added = [dict(token) for token in document.get("added_tokens") or [] if token["content"] in keep]
    top = max(tokens.values(), default=-1) + 1
    for token in sorted(added, key=lambda token: int(token["id"])):
        if token["content"] not in tokens:
            token["id"] = top
            top += 1
    result = {**document, "added_tokens": added, "model": new}
    kept = [*tokens, *(token["content"] for token in added)]
    return documents.write(result, kept, documents.names_of(document))


def _train_ranks(pattern: str, lines: list[str], size: int) -> list[str]:
    """Tokens by rank, written as characters for bytes: the 256 bytes, then one for each merge."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    characters = byte_characters()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=characters, show_progress=False, min_frequency=2)
    tokenizer.train_from_iterator(lines, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return list(dict.fromkeys([*characters, *("".join(pair) for pair in merges)]))[:size]


def _train_spm(form: SpmForm, keep: Collection[str], lines: list[str], size: int) -> Form:
    import sentencepiece

    named = form.named()
    ids: dict[str, Any] = {f"{role}_id": -1 for role in ("unk", "bos", "eos", "pad")}
    pieces: dict[str, Any] = {}
    for index, (role, token) in enumerate(sorted(named.items(), key=lambda item: form.ids()[item[1]])):
        ids[role.replace("_token", "_id")] = index
        pieces[role.replace("_token", "_piece")] = token
    others = [token for token in keep if token not in named.values()]
    control = [token for token in others if token in form.control()]
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=stream,
        vocab_size=size,
        model_type=form.model_type(),
        byte_fallback=form.has_bytes(),
        hard_vocab_limit=False,
        character_coverage=0.9995 if form.has_bytes() else 1.0,
        control_symbols=control,
        user_defined_symbols=[token for token in others if token not in control],
        normalization_rule_name=form.normalization() or "identity",
        num_threads=1,
        minloglevel=2,
        **ids,
        **pieces,
    )
    return form.with_model(stream.getvalue())
