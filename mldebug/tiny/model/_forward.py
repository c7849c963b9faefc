"""One number to go backward from, for any model's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The loss if the outputs have one, else the mean square of all float outputs; None where none has a gradient."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        return loss.mean() if loss.dim() else loss
    squares = [
        tensor.float()[torch.isfinite(tensor)].square().mean()  # masked logits may be -inf
        for tensor in float_tensors(outputs)
        if tensor.requires_grad and bool(torch.isfinite(tensor).any())
    ]
    return torch.stack(squares).sum() if squares else None


def float_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """Every float tensor inside outputs, however they are nested; caches are left out."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from float_tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from float_tensors(value)
