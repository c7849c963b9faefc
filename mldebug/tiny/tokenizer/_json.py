"""tokenizer.json: its vocabulary, and the same document with fewer tokens."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.tiny.tokenizer._vocab import Vocabulary, common_first

SPACE = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it prints, else one from U+0100."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def model_kind(document: Mapping[str, Any]) -> str:
    """The type of the model; documents older than the field are told by their keys."""
    model = document.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        raise MldebugError(
            "tokenizer.json has no model with a vocabulary",
            "a file that the tokenizers library saved has model.type, model.vocab and, for BPE, model.merges",
        )
    kind = model.get("type")
    if kind is None:
        if "merges" in model:
            kind = "BPE"
        elif isinstance(model["vocab"], list):
            kind = "Unigram"
        else:
            kind = "WordPiece" if "continuing_subword_prefix" in model else "WordLevel"
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise MldebugError(
            f"tokenizer.json has a model of type {kind!r}, which mldebug does not know",
            "BPE, Unigram, WordPiece and WordLevel are known",
        )
    return str(kind)


def merge_pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges as pairs: they are written "a b" by older versions and ["a", "b"] by newer ones."""
    return [_pair(merge, model["vocab"]) for merge in model.get("merges") or []]


def _pair(merge: Any, vocab: Collection[str]) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if isinstance(merge, str) and len(parts) > 2:  # a part has spaces of its own: cut where both parts are tokens
        cuts = [(" ".join(parts[:at]), " ".join(parts[at:])) for at in range(1, len(parts))]
        parts = next(([left, right] for left, right in cuts if left in vocab and right in vocab), parts)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        raise MldebugError(f"tokenizer.json has a merge that is no pair: {merge!r}", "save the tokenizer again")
    return parts[0], parts[1]


def model_ids(model: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id of the model itself, without added tokens."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return dict(vocab)
    ids: dict[str, int] = {}
    for index, (piece, _score) in enumerate(vocab):
        ids.setdefault(piece, index)
    return ids


def document_ids(document: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, added tokens included. The model's own id of an added token comes first."""
    ids = model_ids(document["model"])
    for token in document.get("added_tokens") or []:
        ids.setdefault(token["content"], token["id"])
    return ids


def read(document: Mapping[str, Any], specials: Collection[str], dropped: Collection[str] = ()) -> Vocabulary:
    """The vocabulary of the document. `specials` must stay whatever they are; `dropped` are added tokens to leave out.

    Added tokens, the unknown token, what the post-processor and the padding insert must stay; then bytes, and the
    characters where there are no bytes to fall back to.
    """
    model = document["model"]
    kind = model_kind(document)
    ids = {token: id for token, id in document_ids(document).items() if token not in dropped}
    added = [token["content"] for token in document.get("added_tokens") or [] if token["content"] not in dropped]
    named = [token for token in (*_inserted(document), *specials) if token in ids]
    required = {"added tokens": added, "special tokens": [token for token in dict.fromkeys(named)]}
    learnt = model_ids(model)
    merges = [(left, right, _merged(left, right, model)) for left, right in merge_pairs(model)]
    whole, special = set(added), {*added, *named}
    singles = [token for token in learnt if token in ids and len(_bare(token, model)) == 1 and token not in whole]
    alphabet: list[str] = []
    words = [token for token in learnt if token not in special]
    by_character = len(words) > 0 and sum(len(token) == 1 for token in words) >= 0.9 * len(words)
    whole_words = kind == "WordLevel" and not by_character
    if is_byte_level(document):
        known = set(byte_characters())
        required["bytes"] = [token for token in singles if _bare(token, model) in known]
        kind = f"byte-level {kind}"
    elif has_bytes(document):
        required["bytes"] = BYTES
        made = made_by_pipeline(document)
        required["characters that the pipeline inserts"] = [token for token in singles if token in made]
        alphabet = common_first(singles, learnt)
        kind = f"byte-fallback {kind}"
    elif whole_words:
        if model.get("unk_token") not in ids:  # then a word that is not there is an error, not an unknown
            required["words (the source has no unknown token for words that go)"] = list(learnt)
    else:
        if any(step.get("type") == "ByteFallback" for step in steps(document, "decoder")):
            required["byte tokens"] = [token for token in BYTES if token in ids]  # a class may turn falling back on
        required["characters"] = singles
    ranked: list[str] = []
    if kind.endswith("Unigram"):
        scores = {piece: score for piece, score in reversed(model["vocab"])}
        ranked = sorted(scores, key=lambda piece: -scores[piece])
        ranked = [piece for piece in ranked if piece in ids]
    elif not merges:
        ranked = sorted((token for token in learnt if token in ids), key=learnt.__getitem__)
    merges = [merge for merge in merges if merge[2] in ids]
    return Vocabulary(kind, ids, required, alphabet, merges, ranked, model.get("unk_token") if whole_words else None)


def write(document: Mapping[str, Any], kept: Collection[str], names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The document with the tokens of `kept` only: ids 0..n-1 in the old order, everything that names an id follows.

    Tokens of the model come first and added tokens that it does not have after them, as the library numbers them.
    `names` says what the ids in post-processor and padding mean; None where they are ids of the document.
    """
    new = copy.deepcopy({key: value for key, value in document.items() if key != "model"})
    model = document["model"]
    kind = model_kind(document)
    keep = set(kept)
    old = model_ids(model)
    order = sorted((token for token in old if token in keep), key=old.__getitem__)
    ids = {token: index for index, token in enumerate(order)}
    added = [token for token in new.get("added_tokens") or [] if token["content"] in keep]
    for token in sorted(added, key=lambda token: int(token["id"])):
        ids.setdefault(token["content"], len(ids))
        token["id"] = ids[token["content"]]
    new["added_tokens"] = sorted(added, key=lambda token: int(token["id"]))
    smaller = {key: value for key, value in model.items() if key not in ("vocab", "merges", "unk_id")}
    smaller["type"] = kind
    if kind == "Unigram":
        scores = {piece: score for piece, score in reversed(model["vocab"])}
        unknown = model.get("unk_id")
        smaller["unk_id"] = None if unknown is None else ids[model["vocab"][unknown][0]]
        smaller["vocab"] = [[piece, scores[piece]] for piece in order]
    else:
        smaller["vocab"] = {token: ids[token] for token in order}
    if "merges" in model:
        smaller["merges"] = [
            [left, right]
            for left, right in merge_pairs(model)
            if left in ids and right in ids and _merged(left, right, model) in ids
        ]
    meaning = names_of(document) if names is None else names
    for holder in _id_holders(new):
        _renumber(holder, meaning, ids)
    return {**new, "model": smaller}


def steps(document: Mapping[str, Any], *fields: str) -> Iterator[dict[str, Any]]:
    """Each normalizer, pre-tokenizer, decoder or post-processor of the document, nested sequences unrolled."""
    for field in fields:
        yield from _unrolled(document.get(field))


def _unrolled(step: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(step, dict):
        return
    yield step
    for inner in ("normalizers", "pretokenizers", "decoders", "processors"):
        for child in step.get(inner) or []:
            yield from _unrolled(child)


def is_byte_level(document: Mapping[str, Any]) -> bool:
    """Whether text becomes bytes, written as characters, before the model sees it."""
    return any(step.get("type") == "ByteLevel" for step in steps(document, "normalizer", "pre_tokenizer"))


def has_bytes(document: Mapping[str, Any]) -> bool:
    """Whether unknown characters become the 256 byte tokens, all of which are there."""
    return document["model"].get("byte_fallback") is True and set(BYTES) <= model_ids(document["model"]).keys()


def made_by_pipeline(document: Mapping[str, Any]) -> set[str]:
    """Characters that normalizer and pre-tokenizer put into the text, such as the mark for a space."""
    made: set[str] = set()
    for step in steps(document, "normalizer", "pre_tokenizer"):
        texts = (step.get("prepend"), step.get("content"), step.get("replacement"), step.get("str_rep"))
        made.update(character for text in texts if isinstance(text, str) for character in text)
    return made


def _bare(token: str, model: Mapping[str, Any]) -> str:
    """The token without the marks for "goes on a word" and "ends a word"."""
    prefix, suffix = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
    bare = token.removeprefix(prefix) if prefix else token
    bare = bare.removesuffix(suffix) if suffix else bare
    return bare or token


def _merged(left: str, right: str, model: Mapping[str, Any]) -> str:
    prefix = model.get("continuing_subword_prefix") or ""
    return left + (right[len(prefix) :] if prefix and right.startswith(prefix) else right)


def _inserted(document: Mapping[str, Any]) -> list[str]:
    """Tokens that appear without being in the text: unknown, padding, and those of the post-processors."""
    model = document["model"]
    tokens = [model.get("unk_token")]
    if isinstance(model.get("unk_id"), int) and isinstance(model["vocab"], list):
        tokens.append(model["vocab"][model["unk_id"]][0])
    names = names_of(document)
    for holder in _id_holders(document):
        if "pad_token" in holder:
            tokens.append(_meant(holder["pad_token"], holder.get("pad_id"), names))
        for part in ("sep", "cls"):
            if isinstance(holder.get(part), (list, tuple)):
                tokens.append(_meant(holder[part][0], holder[part][1], names))
        for special in _template_tokens(holder):
            tokens += _meant_by(special, names)
    return [token for token in tokens if isinstance(token, str)]


def _template_tokens(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    specials = step.get("special_tokens")
    return list(specials.values()) if isinstance(specials, dict) else []


def names_of(document: Mapping[str, Any]) -> dict[int, str]:
    """Id -> token, added tokens included."""
    return {id: token for token, id in document_ids(document).items()}


def _meant(token: Any, id: Any, names: Mapping[int, str]) -> Any:
    """The token that is inserted: the id counts, and the name beside it may be any. It counts where the id is none."""
    return names.get(id, token)


def _meant_by(special: Mapping[str, Any], names: Mapping[int, str]) -> list[Any]:
    """The tokens that a special token of a template stands for."""
    ids, tokens = special.get("ids") or [], special.get("tokens") or []
    padded = [*tokens, *[None] * (len(ids) - len(tokens))]
    return [_meant(token, id, names) for token, id in zip(padded, ids, strict=False)]


def repaired(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]] | None:
    """The document with ids that exist in its post-processor, and those that did not; None if nothing was wrong.

    A tokenizer that was trained anew may keep the ids of its past in there; the names beside them say what they were.
    """
    names, ids = names_of(document), document_ids(document)
    stale: list[int] = []
    for step in steps(document, "post_processor"):
        pairs = [step[part] for part in ("sep", "cls") if isinstance(step.get(part), list) and len(step[part]) == 2]
        for special in _template_tokens(step):
            pairs += zip(special.get("tokens") or [], special.get("ids") or [], strict=False)
        stale += [id for token, id in pairs if id not in names and token in ids]
    if not stale:
        return None
    new = {**document, "post_processor": copy.deepcopy(document["post_processor"])}
    for step in steps(new, "post_processor"):
        _renumber(step, names, ids)
    return new, stale


def _id_holders(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from steps(document, "post_processor")
    if isinstance(document.get("padding"), dict):
        yield document["padding"]


def _renumber(holder: dict[str, Any], names: Mapping[int, str], ids: Mapping[str, int]) -> None:
    """Give the ids in a post-processor or the padding their new values."""
    if "pad_id" in holder:
        holder["pad_id"] = ids.get(_meant(holder.get("pad_token"), holder["pad_id"], names), holder["pad_id"])
    for part in ("sep", "cls"):
        pair = holder.get(part)
        if isinstance(pair, list):
            holder[part] = [pair[0], ids.get(_meant(pair[0], pair[1], names), pair[1])]
    for special in _template_tokens(holder):
        special["ids"] = [ids[token] for token in _meant_by(special, names) if token in ids]
