"""idefics: pictures and texts in turns, with cross-attention between the layers, and its processor.

python tiny/idefics.py idefics-tiny
python tiny/idefics.py idefics-tiny --source HuggingFaceM4/idefics-9b    # the real one, made small
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
    from transformers import AutoTokenizer, IdeficsConfig, IdeficsImageProcessor, IdeficsProcessor

    specials = ("<fake_token_around_image>", "<image>")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "idefics"
        learned = _tokenizers.byte_fallback(Path(folder) / "tokenizer", specials=specials, pad_token="<unk>")
        tokenizer = AutoTokenizer.from_pretrained(learned)
        config = IdeficsConfig(vocab_size=len(tokenizer), architectures=["IdeficsForVisionText2Text"])
        config.save_pretrained(whole)
        IdeficsProcessor(image_processor=IdeficsImageProcessor(image_size=224), tokenizer=tokenizer).save_pretrained(
            whole
        )
        return tiny_model(whole, output, vocab=600)


if __name__ == "__main__":
    _data.run(build, __doc__)
