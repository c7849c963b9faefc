"""Inputs through a model's own processor or tokenizer: a picture, a sound and a sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mldebug.core.errors import MldebugError
from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._makers import Values

SENTENCE = "A tiny model reads this sentence and looks at the picture."


def processed(facts: Facts, processor: Any) -> Values:
    """What the processor makes of a real picture and sound, as far as the forward takes it.

    Each way to call it is tried; where none gives what the forward runs with, MldebugError with the first reason.
    """
    failed: list[str] = []
    for arguments in _calls(facts, processor):
        try:
            given = dict(processor(**arguments, return_tensors="pt"))
            inputs = _fitted(facts, given)
            with torch.no_grad():
                facts.model(**inputs)
            return inputs
        except Exception as exc:
            failed.append(f"{type(exc).__name__}: {exc}".split("\n")[0][:200])
    reason = failed[0] if failed else "it takes neither text, images nor audio"
    raise MldebugError(
        f"{type(processor).__name__} and {type(facts.model).__name__} do not fit: {reason}",
        "compare the sizes in preprocessor_config.json with those in config.json",
    )


def with_words(inputs: Values, tokenizer: Any) -> Values:
    """`inputs` with the ids of a real text, as many as there are."""
    ids = inputs.get("input_ids")
    if ids is None or ids.dim() != 2:
        return inputs
    length = ids.shape[1]
    words = tokenizer(SENTENCE * (1 + length // 8), truncation=True, max_length=length)["input_ids"]
    if len(words) < length:
        return inputs
    return {**inputs, "input_ids": torch.tensor([words] * len(ids))}


def _calls(facts: Facts, processor: Any) -> Iterator[dict[str, Any]]:
    """Ways to call a processor, the fullest first."""
    images, audio = _images(facts, processor), _audio(facts, processor)
    name = type(processor).__name__
    seen = facts.takes("pixel_values", "flattened_patches", "image_patches", "pixel_values_images", "image")
    heard = facts.takes("input_features", "input_values")
    parts: dict[str, Any] = {}
    if "FeatureExtractor" in name:
        yield {"raw_speech": audio, "sampling_rate": _rate(processor)}
        yield {"audio": audio, "sampling_rate": _rate(processor)}
        return
    if "ImageProcessor" in name:
        yield {"images": images}
        return
    reads = hasattr(processor, "tokenizer")
    if seen and hasattr(processor, "image_processor"):
        parts["images"] = images
    if heard and hasattr(processor, "feature_extractor"):
        parts["audio"] = audio
    if reads and facts.takes("input_ids"):
        for text in _prompts(processor, parts):
            yield {"text": [text] * facts.batch, **parts}
            if "audio" in parts:
                yield {"text": [text] * facts.batch, **parts, "sampling_rate": _rate(processor.feature_extractor)}
    if parts:
        yield parts
        if "audio" in parts:
            yield {**parts, "sampling_rate": _rate(processor.feature_extractor)}
    if reads and not parts:  # a text alone would say nothing about the picture or the sound
        yield {"text": [SENTENCE] * facts.batch}


def _prompts(processor: Any, parts: dict[str, Any]) -> Iterator[str]:
    """The sentence with a placeholder for each part, as the chat template writes it, else by the processor's token."""
    kinds = {"images": "image", "audio": "audio"}
    content = [{"type": kinds[part]} for part in parts]
    if getattr(processor, "chat_template", None):
        with contextlib.suppress(Exception):  # a template of another kind: the plain prompts follow
            yield processor.apply_chat_template(
                [{"role": "user", "content": [*content, {"type": "text", "text": SENTENCE}]}],
                add_generation_prompt=True,
            )
    tokens = [token for part in parts if isinstance(token := getattr(processor, f"{kinds[part]}_token", None), str)]
    if tokens:
        yield "".join(tokens) + " " + SENTENCE
    yield SENTENCE


def _images(facts: Facts, _processor: Any) -> list[Any]:
    from PIL import Image

    height, width = facts.size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (max(height, 16), max(width, 16), 3), generator=generator, dtype=torch.uint8)
    return [Image.fromarray(pixels.numpy(), "RGB") for _ in range(facts.batch)]


def _audio(facts: Facts, processor: Any) -> Any:
    import numpy as np

    rate = _rate(getattr(processor, "feature_extractor", processor))
    time = np.arange(rate // 2) / rate
    sound = (0.3 * np.sin(2 * np.pi * 220 * time)).astype(np.float32)
    return [sound] * facts.batch


def _rate(extractor: Any) -> int:
    return int(getattr(extractor, "sampling_rate", 16000) or 16000)


def _fitted(facts: Facts, given: Values) -> Values:
    """What the forward takes, in the dtype of the model; what an encoder-decoder reads beside its encoder is added."""
    inputs: Values = {}
    takes_more = len(facts.parameters) < 4  # a forward that is only **kwargs
    for name, value in given.items():
        if name in facts.parameters or takes_more:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            inputs[name] = value.to(facts.dtype) if floats else value
    if (
        facts.config.is_encoder_decoder
        and "decoder_input_ids" in facts.parameters
        and "decoder_input_ids" not in inputs
    ):
        from mldebug.tiny.model.inputs._makers import makers_for

        inputs["decoder_input_ids"] = makers_for(facts, "decoder_input_ids")[0](facts, inputs)
    return inputs
