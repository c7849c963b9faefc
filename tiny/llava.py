"""llava: a language model that sees, with its processor: pictures of a few pixels become a few image tokens.

python tiny/llava.py llava-tiny
python tiny/llava.py llava-tiny --source llava-hf/llava-1.5-7b-hf    # the real one, made small
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
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaConfig, LlavaProcessor

    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "llava"
        learned = _tokenizers.byte_fallback(
            Path(folder) / "tokenizer", specials=("<image>", "<pad>"), pad_token="<pad>"
        )
        tokenizer = AutoTokenizer.from_pretrained(learned)
        config = LlavaConfig(architectures=["LlavaForConditionalGeneration"])
        config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
        config.text_config.vocab_size = len(tokenizer)
        config.save_pretrained(whole)
        LlavaProcessor(
            image_processor=CLIPImageProcessor(size={"shortest_edge": 336}, crop_size=336),
            tokenizer=tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ).save_pretrained(whole)
        return tiny_model(whole, output, vocab=600)


if __name__ == "__main__":
    _data.run(build, __doc__)
