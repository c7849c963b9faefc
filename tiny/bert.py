"""bert: two layers of BERT with 600 word pieces.

python tiny/bert.py bert-tiny
python tiny/bert.py bert-tiny --source google-bert/bert-base-uncased    # the real one, made small
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import _data
import _tokenizers

from mldebug import TinyModelReport, tiny_model


def build(output: str | Path, source: str | None = None) -> TinyModelReport:
    if source is not None:
        return tiny_model(source, output, vocab=600)
    with tempfile.TemporaryDirectory() as folder:
        return tiny_model("bert", output, vocab=600, tokenizer=_tokenizers.wordpiece(Path(folder)))


if __name__ == "__main__":
    _data.run(build, __doc__)
