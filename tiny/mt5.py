"""mt5: two layers of each side of mT5, with 600 pieces of which a hundred are the sentinels of masked spans.

python tiny/mt5.py mt5-tiny
python tiny/mt5.py mt5-tiny --source google/mt5-small    # the real one, made small
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
        return tiny_model("mt5", output, vocab=600, tokenizer=_tokenizers.unigram(Path(folder)))


if __name__ == "__main__":
    _data.run(build, __doc__)
