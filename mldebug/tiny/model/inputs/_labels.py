"""Labels, so that a model gives a loss: tried by the kind of its class until one is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mldebug.tiny.model.inputs._facts import Facts
from mldebug.tiny.model.inputs._makers import Values

# Classes whose label is one number for a whole input, by words of their names.
_ONE_PER_INPUT = re.compile(r"Classification|MultipleChoice|XVector|Regression|NextSentence")


def add_labels(facts: Facts, inputs: Values, run: Callable[[Values], Any]) -> Values:
    """`inputs` with labels for which the forward gives a finite loss; as they were where none does."""
    if _loss(run(inputs)) is not None:
        return inputs
    for labels in _candidates(facts, inputs):
        tried = {**inputs, **labels}
        try:
            loss = _loss(run(tried))
        except Exception:
            continue
        if loss is not None and bool(torch.isfinite(loss).all()):
            return tried
    return inputs


def _loss(outputs: Any) -> torch.Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) and loss.is_floating_point() else None


def _candidates(facts: Facts, inputs: Values) -> Iterator[Values]:
    name = type(facts.model).__name__
    if facts.takes("return_loss"):
        yield {"return_loss": True}
    if facts.takes("start_positions") and facts.takes("end_positions"):
        yield {
            "start_positions": torch.zeros(facts.batch, dtype=torch.long),
            "end_positions": torch.ones(facts.batch, dtype=torch.long),
        }
    if facts.takes("mask_labels") and facts.takes("class_labels"):
        yield from _segments(facts, inputs)
    if facts.takes("labels", "next_sentence_label"):
        whole = list(_whole(facts, inputs))
        each = list(_each(facts, inputs))
        found = (
            whole + each
            if _ONE_PER_INPUT.search(name) and "Token" not in name and "Frame" not in name
            else each + whole
        )
        for labels in [*found, *_pictures(facts, inputs)]:
            yield {"labels": labels}
            if facts.takes("next_sentence_label"):
                yield {"labels": labels, "next_sentence_label": torch.zeros(facts.batch, dtype=torch.long)}
            if facts.takes("sentence_order_label"):
                yield {"labels": labels, "sentence_order_label": torch.zeros(facts.batch, dtype=torch.long)}


def _whole(facts: Facts, _inputs: Values) -> Iterator[Any]:
    classes = max(1, facts.number("num_labels", default=facts.config.num_labels or 2))
    if classes > 1:
        yield facts.ints(facts.batch, high=classes)
    yield facts.floats(facts.batch)
    yield facts.floats(facts.batch, classes)


def _each(facts: Facts, inputs: Values) -> Iterator[Any]:
    """One label for each token; a transcript for audio."""
    ids, decoder = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    classes = facts.config.num_labels or 2
    if decoder is not None:
        yield decoder.clone()
    if ids is not None:
        if "TokenClassification" in type(facts.model).__name__:
            yield facts.ints(*ids.shape, high=classes)
        yield ids.clone()
    yield facts.ints(facts.batch, 4, high=facts.vocab, low=1)
    if ids is None:
        yield facts.ints(facts.batch, 2, high=max(2, facts.vocab - 1), low=1)


def _pictures(facts: Facts, inputs: Values) -> Iterator[Any]:
    """Boxes, maps of classes, maps of numbers."""
    image = inputs.get("pixel_values")
    if image is None or image.dim() < 4:
        return
    classes = facts.config.num_labels or 2
    height, width = image.shape[-2:]
    yield [
        {
            "class_labels": facts.ints(1, high=classes),
            "boxes": torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=facts.dtype),
        }
        for _ in range(facts.batch)
    ]
    yield [
        {
            "class_labels": facts.ints(1, high=classes),
            "boxes": torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=facts.dtype),
            "masks": torch.ones(1, height, width, dtype=facts.dtype),
        }
        for _ in range(facts.batch)
    ]
    yield facts.ints(facts.batch, height, width, high=classes)
    yield facts.floats(facts.batch, height, width).abs()
    yield image.clone()


def _segments(facts: Facts, inputs: Values) -> Iterator[Values]:
    height, width = inputs["pixel_values"].shape[-2:]
    classes = facts.config.num_labels or 2
    masks = torch.zeros(2, height, width, dtype=facts.dtype)
    masks[0, : height // 2] = 1
    masks[1, height // 2 :] = 1
    labels = [facts.ints(2, high=classes) for _ in range(facts.batch)]
    yield {"mask_labels": [masks] * facts.batch, "class_labels": labels}
