"""The checks that train: gradients, and a loss that falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mldebug.tiny.model._forward import float_tensors, loss_of

STEPS = 30  # in which the loss must fall


def backward(model: Any, inputs: Mapping[str, Any]) -> tuple[bool, str]:
    model.zero_grad()
    if _gradients(model, inputs, loss_of) is None:
        return False, "no output of the forward has a gradient"
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    without = [name for name, parameter in named if parameter.grad is None]
    bad = [
        name
        for name, parameter in named
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    model.zero_grad()
    if bad:
        return False, f"the gradient is not finite: {some(bad)}"
    if len(without) == len(named):
        return False, "no parameter got a gradient"
    if without:
        return (
            True,
            f"{len(named) - len(without)} of {len(named)} parameters got a gradient; without: {some(without, 6)}",
        )
    return True, f"all {len(named)} parameters got a gradient"


def _gradients(model: Any, inputs: Mapping[str, Any], objective: Callable[[Any], Any]) -> float | None:
    """Forward and backward; the loss, or None where there is none that has a gradient. In eval mode, without dropout:
    only the few classes that refuse gradients there are trained as they want it."""
    try:
        loss = objective(model(**inputs))
        if loss is None or not loss.requires_grad:
            return None
        loss.backward()
    except AssertionError as exc:
        if "train" not in str(exc) or model.training:
            raise
        model.train()
        return _gradients(model, inputs, objective)
    return float(loss.detach())


def _distance(outputs: Any) -> torch.Tensor | None:
    """How far all outputs but the loss are from fixed random numbers, which any model can make less."""
    generator = torch.Generator().manual_seed(0)
    far = [
        (tensor.float() - torch.randn(tensor.shape, generator=generator))[torch.isfinite(tensor)].square().mean()
        for tensor in float_tensors(outputs)
        if tensor.dim() and tensor.requires_grad and bool(torch.isfinite(tensor).any())
    ]
    return torch.stack(far).sum() if far else None


def loss_falls(model: Any, inputs: Mapping[str, Any]) -> tuple[bool, str]:
    """On one batch, by Adam, first with large steps and then with smaller ones. Changes the weights of `model`.

    Without a loss, or where that of one example is constant (as contrastive ones are), it is a distance that must fall.
    """
    precision = ""
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        # The squares of small gradients are 0 in float16, which no optimizer can divide by: it is trained in float32.
        model.float()
        inputs = _widened(inputs)
        precision = ", in float32"
    start = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    outputs = model(**inputs)
    has_loss = (outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)) is not None
    said = "no loss that has a gradient"
    for objective, kind in ((loss_of, ""), (_distance, " (distance of the outputs from random numbers)")):
        if objective is loss_of and not has_loss:
            continue
        for rate in (1e-2, 1e-3, 1e-4):
            model.load_state_dict(start, strict=False)
            losses = _train(model, inputs, rate, objective)
            if not losses:
                break
            steps = "1 step" if len(losses) == 2 else f"{len(losses) - 1} steps"
            said = f"{losses[0]:.4g} to {min(losses):.4g} in {steps}{precision}{kind}"
            if min(losses) < losses[0] and all(map(math.isfinite, losses)):
                return True, said
        if "return_loss" not in inputs or not losses or max(losses) > min(losses):
            break
    return False, f"it does not fall: {said}"


def _widened(value: Any) -> Any:
    """Inputs with their float16 tensors in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.float16 else value
    if isinstance(value, Mapping):
        return {key: _widened(item) for key, item in value.items()}
    return [_widened(item) for item in value] if isinstance(value, list) else value


def _train(model: Any, inputs: Mapping[str, Any], rate: float, objective: Callable[[Any], Any]) -> list[float]:
    """Losses until one is a tenth lower than the first, or of all steps."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate, foreach=True)
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        for _step in range(STEPS + 1):
            torch.manual_seed(0)  # what a forward draws is the same each time
            optimizer.zero_grad()
            loss = _gradients(model, inputs, objective)
            if loss is None:
                break
            losses.append(loss)
            if not math.isfinite(loss) or loss < losses[0] - 0.1 * abs(losses[0]):
                break
            optimizer.step()
    return losses


def some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
