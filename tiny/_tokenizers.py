"""Tokenizers of the usual kinds, learned in a moment from the texts of the recipes. The models' recipes shrink them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _data
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SIZE = 2000  # what is learned; the tiny models have 600 of them
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(folder: Path, *, name: str = "GPT2Tokenizer", specials: tuple[str, ...] = ("<|endoftext|>",)) -> Path:
    """As GPT-2 has it: any byte is a token, and no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=SIZE, initial_alphabet=alphabet, show_progress=False), folder)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    first, last = specials[0], specials[-1]
    return _save(tokenizer, folder, name, bos_token=first, eos_token=last, unk_token=first)


def byte_fallback(folder: Path, **config: Any) -> Path:
    """As Llama has it: spaces are marks, and a character that is no token becomes its bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for learning only
    specials = ["<unk>", "<s>", "</s>", *BYTES]
    _train(tokenizer, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=specials, show_progress=False), folder)
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
    added = [AddedToken(token, special=True, normalized=False) for token in config.pop("specials", ())]
    tokenizer.add_special_tokens(added)
    return _save(tokenizer, folder, "LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>", **config)


def unigram(folder: Path) -> Path:
    """As T5 has it: pieces with scores, and the sentinels that stand for masked spans."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    specials = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=specials, unk_token="<unk>", show_progress=False, max_piece_length=8
    )
    _train(tokenizer, trainer, folder)
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(100))]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in sentinels])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _save(
        tokenizer, folder, "T5Tokenizer", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", extra_ids=100,
        additional_special_tokens=sentinels[::-1],
    )  # fmt: skip


def wordpiece(folder: Path) -> Path:
    """As BERT has it: words in lower case, cut into pieces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=specials, show_progress=False), folder)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return _save(tokenizer, folder, "BertTokenizer", **dict(zip(names, specials, strict=True)))


def _train(tokenizer: Tokenizer, trainer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.train_from_iterator(_data.corpus(folder).read_text(encoding="utf-8").splitlines(), trainer)


def _save(tokenizer: Tokenizer, folder: Path, name: str, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": name, "model_max_length": 512, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
