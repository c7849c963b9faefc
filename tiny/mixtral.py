"""mixtral: a mixture of experts, two layers of Mixtral with four experts of which two work on each token.

python tiny/mixtral.py mixtral-tiny
python tiny/mixtral.py mixtral-tiny --source path/to/mixtral    # the real one, made small
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
        return tiny_model("mixtral", output, vocab=600, tokenizer=_tokenizers.byte_fallback(Path(folder)))


if __name__ == "__main__":
    _data.run(build, __doc__)
