"""gpt2: two layers of GPT-2 with 600 tokens of a byte-level vocabulary.

python tiny/gpt2.py gpt2-tiny
python tiny/gpt2.py gpt2-tiny --source openai-community/gpt2    # the real one, made small
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
        return tiny_model("gpt2", output, vocab=600, tokenizer=_tokenizers.byte_level(Path(folder)))


if __name__ == "__main__":
    _data.run(build, __doc__)
