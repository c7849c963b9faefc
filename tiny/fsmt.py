"""fsmt: the vocabulary first, as small as can be, and a translation model of that size after it.

Its tokenizer has one vocabulary for each side and reads them from files that no tokenizer.json replaces, so these are
learned here and laid beside the model. Loading the tokenizer takes the package sacremoses; the model needs nothing.

python tiny/fsmt.py fsmt-tiny
"""

from __future__ import annotations

import json
from pathlib import Path

import _data
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mldebug import TinyModelReport, tiny_model

SIZE = 600
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def build(output: str | Path) -> TinyModelReport:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(_data.texts(400, ("en", "de"), seed=5), trainer)
    vocabulary = tokenizer.get_vocab()
    sizes = {"src_vocab_size": len(vocabulary), "tgt_vocab_size": len(vocabulary)}
    report = tiny_model("fsmt", output, set={**sizes, "langs": ["en", "de"]})

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    lines = [" ".join(pair) for pair in merges]
    text = json.dumps(dict(sorted(vocabulary.items(), key=lambda pair: pair[1])), ensure_ascii=False)
    for name in ("vocab-src.json", "vocab-tgt.json"):
        (Path(output) / name).write_text(text, encoding="utf-8")
    (Path(output) / "merges.txt").write_text("\n".join(f"{line} 1" for line in lines) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "FSMTTokenizer", "langs": ["en", "de"], "model_max_length": 128}
    (Path(output) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return report


if __name__ == "__main__":
    _data.run(build, __doc__)
