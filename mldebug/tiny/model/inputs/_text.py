"""Token ids, with placeholders for features, and what goes with them."""

from __future__ import annotations

import re

import torch

from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._images import Maker, Values


def input_ids(facts: Facts) -> list[Maker]:
    if "MultipleChoice" in type(facts.model).__name__:
        return [lambda facts, _made: facts.ids(facts.batch, 2, facts.length), _text]
    if facts.value("num_codebooks", "n_codebooks", "num_quantizers") is not None:
        return [_text, _codebooks_last, _text_and_codebooks, _codebooks_first]
    return [_text]


def _text(facts: Facts, _made: Values) -> torch.Tensor:
    """Plain ids with, for each kind of feature, as many placeholders as `facts.count` says. Ends with eos."""
    pieces: list[int] = []
    for kind in ("image", "video", "audio"):
        count, token = facts.count.get(kind, 0), placeholder(facts, kind)
        if count and token is not None:
            start = facts.token(*(f"{name}_token_{tail}" for name in _STARTS[kind] for tail in ("id", "index")))
            end = facts.token(*(f"{name}_token_{tail}" for name in _ENDS[kind] for tail in ("id", "index")))
            piece = [*([start] if start is not None else []), *[token] * count, *([end] if end is not None else [])]
            pieces += piece
    plain = max(4 if pieces else 1, facts.length - len(pieces))
    if facts.positions:
        plain = max(1, min(plain, facts.positions - len(pieces)))
    if facts.takes(
        "image_embeds_position_mask"
    ):  # these places are marked in the text, not filled with an id of their own
        plain = max(plain, facts.number("latent_query_num", default=4) + 2)
    text = facts.ids(facts.batch, plain)
    eos = facts.token("eos_token_id")
    if eos is not None and 0 <= eos < facts.vocab and plain > 1:
        text[:, -1] = eos
    if not pieces:
        return text
    fixed = torch.tensor([pieces] * facts.batch)
    return torch.cat([text[:, :1], fixed, text[:, 1:]], dim=1) if plain > 1 else torch.cat([fixed, text], dim=1)


_STARTS = {
    "image": ("vision_start", "image_start", "boi", "img_start", "image_bos", "im_start_image"),
    "video": ("vision_start", "video_start", "boi"),
    "audio": ("audio_start", "boa", "audio_bos"),
}
_ENDS = {
    "image": ("vision_end", "image_end", "eoi", "img_end"),
    "video": ("vision_end", "video_end", "eoi"),
    "audio": ("audio_end", "eoa", "audio_eos"),
}


def placeholder(facts: Facts, kind: str) -> int | None:
    """The id whose embeddings are replaced by features of `kind`."""
    tails = ("token_id", "token_index", "pad_token_id", "patch_id", "placeholder_token_id")
    names = [f"{kind}_{tail}" for tail in tails]
    if kind == "image":
        names += ["media_placeholder_token_id", "im_patch_id", "img_context_token_id", "image_pad_id"]
    return facts.token(*names)


def _codebooks_last(facts: Facts, _made: Values) -> torch.Tensor:
    books = facts.number("num_codebooks", "n_codebooks", "num_quantizers", default=8)
    return facts.ints(
        facts.batch, facts.length, books, high=facts.number("codebook_size", "vocab_size", default=facts.vocab)
    )


def _text_and_codebooks(facts: Facts, _made: Values) -> torch.Tensor:
    """A text stream beside those of the codebooks: all ids are small enough for both."""
    books = facts.number("num_codebooks", "n_codebooks", "num_quantizers", default=8)
    sizes = [facts.vocab, facts.number("codebook_size", "codebook_vocab_size", "audio_vocab_size", default=facts.vocab)]
    return facts.ints(facts.batch, facts.length, books + 1, high=min(sizes))


def _codebooks_first(facts: Facts, _made: Values) -> torch.Tensor:
    books = facts.number("num_codebooks", "n_codebooks", "num_quantizers", default=8)
    return facts.ints(
        facts.batch * books, facts.length, high=min(facts.vocab, facts.number("codebook_size", default=facts.vocab))
    )


def decoder_ids(facts: Facts) -> list[Maker]:
    def plain(facts: Facts, made: Values) -> torch.Tensor:
        config = facts.config.get_text_config(decoder=True).to_dict()
        vocab = config.get("vocab_size") or facts.vocab
        most = config.get("max_target_positions") or config.get("max_position_embeddings") or 16
        # A class that reads its answer at places of the input has the decoder read the input.
        same = "input_ids" in made and re.search("SequenceClassification|QuestionAnswering", type(facts.model).__name__)
        ids = facts.ints(
            facts.batch,
            made["input_ids"].shape[-1] if same else max(1, min(facts.length, most - 3)),
            high=min(vocab, facts.vocab) if vocab else facts.vocab,
            low=min(3, vocab - 1),
        )
        start = facts.value("decoder_start_token_id")
        if isinstance(start, int) and 0 <= start < vocab:
            ids[:, 0] = start
        return ids

    def codebooks(facts: Facts, made: Values) -> torch.Tensor:
        return _codebooks_last(facts, made)

    def codebooks_first(facts: Facts, _made: Values) -> torch.Tensor:
        decoder = facts.config_dict.get("decoder_config") or facts.config_dict.get("decoder") or {}
        books = decoder.get("num_codebooks") or facts.number("num_codebooks", default=4)
        return facts.ints(facts.batch * books, 4, high=decoder.get("vocab_size") or facts.vocab)

    decoder = facts.config_dict.get("decoder_config") or facts.config_dict.get("decoder") or {}
    by_books = isinstance(decoder, dict) and decoder.get("num_codebooks")
    return (
        [codebooks, codebooks_first, plain]
        if facts.value("num_codebooks") and not by_books
        else ([codebooks_first, plain] if by_books else [plain, codebooks, codebooks_first])
    )


def ones_like_ids(facts: Facts, made: Values) -> torch.Tensor:
    ids = made.get("input_ids")
    if ids is None:
        return torch.ones(facts.batch, facts.length, dtype=torch.long)
    choices = "MultipleChoice" in type(facts.model).__name__
    return torch.ones(ids.shape if choices else ids.shape[:2], dtype=torch.long)


def token_types(facts: Facts, made: Values) -> torch.Tensor:
    return torch.zeros_like(ones_like_ids(facts, made))


def kinds_of_tokens(facts: Facts, made: Values) -> torch.Tensor:
    """0 for text, 1 for image, 2 for video and 3 for audio placeholders."""
    ids = made["input_ids"]
    kinds = torch.zeros_like(ids)
    for number, kind in enumerate(("image", "video", "audio"), start=1):
        token = placeholder(facts, kind)
        if token is not None:
            kinds[ids == token] = number
    return kinds


def boxes(facts: Facts) -> list[Maker]:
    high = min(1000, facts.number("max_2d_position_embeddings", default=1000) - 1)

    def corners(facts: Facts, made: Values) -> torch.Tensor:
        shape = ones_like_ids(facts, made).shape
        first = facts.ints(*shape, 2, high=max(2, high // 2))
        return torch.cat([first, first + facts.ints(*shape, 2, high=max(2, high // 2))], dim=-1)

    def ratios(facts: Facts, made: Values) -> torch.Tensor:
        return corners(facts, made).to(facts.dtype) / max(high, 1)

    return [ratios, corners] if facts.config.model_type in ("bros", "udop") else [corners, ratios]


def qformer_ids(facts: Facts, _made: Values) -> torch.Tensor:
    vocab = (facts.config_dict.get("qformer_config") or {}).get("vocab_size") or facts.vocab
    return facts.ints(facts.batch, 4, high=vocab)
