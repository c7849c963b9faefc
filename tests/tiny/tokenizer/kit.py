"""Makes small tokenizers of every kind to be shrunk, as their real ones are laid out on disk."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mldebug.tiny.tokenizer._checks import SAMPLE
from mldebug.tiny.tokenizer._ranks import as_bytes

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8").splitlines()  # a text that stays
CORPUS = [*WORDS, *[line for line in SAMPLE if line] * 3]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
LLAMA3_SPECIALS = ["<|begin|>", "<|end|>", *(f"<|reserved_{n}|>" for n in range(5)), "<|head|>", "<|/head|>", "<|eot|>"]


def special(token: str, **flags: bool) -> AddedToken:
    return AddedToken(token, special=True, normalized=False, **flags)


def save(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def byte_bpe(directory: Path, size: int = 2000, **more: Any) -> Path:
    """Like Llama 3: byte-level, special tokens after the vocabulary, the first put in by a nested post-processor."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+(?!\S)|[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([special(token) for token in LLAMA3_SPECIALS])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A", pair="<|begin|> $A <|begin|>:1 $B:1", special_tokens=[("<|begin|>", begin)]
            ),
        ]
    )
    table = {
        str(tokenizer.token_to_id(token)): {"content": token, "special": True, "normalized": False}
        for token in LLAMA3_SPECIALS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": TEMPLATE,
        "added_tokens_decoder": table,
        "model_max_length": 4096,
        **more,
    }
    save(directory, tokenizer, **config)
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<|begin|>", "eos_token": "<|end|>"}')
    return directory


def byte_fallback_bpe(directory: Path, size: int = 2000) -> Path:
    """Like Llama 2: characters that are not there become bytes, spaces become a mark."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *BYTES], limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if not token["content"].startswith("<0x")]
    document["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return save(
        directory,
        tokenizer,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}<s>[INST] {{ m['content'] }} [/INST]</s>{% endfor %}",
    )


def unigram(directory: Path, size: int = 2000) -> Path:
    """Like XLM-R: pieces with scores, a post-processor of the RoBERTa kind, a mask that eats the space before it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", tokenizer.token_to_id("</s>")), ("<s>", tokenizer.token_to_id("<s>")), True, False
    )
    return save(
        directory,
        tokenizer,
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        cls_token="<s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
    )


def wordpiece(directory: Path, size: int = 2000) -> Path:
    """Like BERT, uncased, with BertProcessing."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return save(
        directory,
        tokenizer,
        tokenizer_class="PreTrainedTokenizerFast",
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def wordlevel(directory: Path, size: int = 1000) -> Path:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=["<pad>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return save(directory, tokenizer, tokenizer_class="PreTrainedTokenizerFast", unk_token="<unk>", pad_token="<pad>")


def sentencepiece_model(path: Path, kind: str, size: int = 1200, lines: Iterable[str] = CORPUS, **options: Any) -> Path:
    import io

    import sentencepiece

    stream = io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=stream,
        vocab_size=size,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    path.write_bytes(stream.getvalue())
    return path


def byte_tokens(size: int) -> list[str]:
    """Tokens by rank, written as characters; the single bytes first, in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=lambda token: (len(token) > 1, as_bytes(token) if len(token) == 1 else b"", ids[token]))


def tiktoken_file(path: Path, size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(as_bytes(token)).decode()} {rank}" for rank, token in enumerate(byte_tokens(size))]
    path.write_text("\n".join(lines) + "\n")
    return path


def tekken_file(path: Path, size: int = 1000, specials: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(as_bytes(token)).decode(), "token_str": token}
        for rank, token in enumerate(byte_tokens(size))
    ]
    config = {
        "pattern": r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        "num_vocab_tokens": len(rows),
        "default_vocab_size": len(rows) - 50 + specials,
        "default_num_special_tokens": specials,
        "version": "v3",
    }
    path.write_text(json.dumps({"config": config, "vocab": rows}))
    return path


MAKERS = {
    "byte-level BPE": byte_bpe,
    "byte-fallback BPE": byte_fallback_bpe,
    "Unigram": unigram,
    "WordPiece": wordpiece,
    "WordLevel": wordlevel,
    "SentencePiece BPE": lambda directory: (
        sentencepiece_model(directory / "tokenizer.model", "bpe", byte_fallback=True, character_coverage=0.98).parent
    ),
    "SentencePiece Unigram": lambda directory: sentencepiece_model(directory / "spiece.model", "unigram").parent,
    "tiktoken": lambda directory: tiktoken_file(directory / "words.tiktoken").parent,
    "tekken": lambda directory: tekken_file(directory / "tekken.json").parent,
}
