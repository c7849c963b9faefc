"""diagnose() on a GPU: backward runs in a thread of its own there, and the operations are named all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import diagnose

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model_with(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4, bias=False))
    model.add_module("f", Apply(function))
    with torch.no_grad():
        model.fc.weight.copy_(torch.eye(4))
    return model.to("cuda", dtype)


def found(model: nn.Module, data: Callable[[int], Tensor], steps: int = 3) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(data(i).cuda()).float().mean()
        loss.backward()
        optimizer.step()
        return loss

    return diagnose(model, step, steps=steps).event


def test_forward() -> None:
    event = found(model_with(lambda x: x / x.sum(-1, keepdim=True)), lambda i: torch.full((2, 4), float(i < 2)))
    assert (event.step, event.phase, event.module, event.kind) == (2, "forward", "f", "nan")
    assert event.op.startswith("aten.div") and "x / x.sum" in event.operation.code


def test_backward() -> None:
    model = model_with(lambda x: torch.where(x > 0, x.sqrt(), 0.0))
    event = found(model, lambda i: torch.tensor([[1.0, float(i < 1), 2.0, 3.0]]))
    assert (event.step, event.phase, event.module, event.op) == (1, "backward", "f", "SqrtBackward0")
    assert event.operation.forward_op == "aten.sqrt" and "x.sqrt()" in event.operation.code


def test_an_overflow_of_the_loss_scale_is_benign() -> None:
    model = model_with(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(torch.ones(2, 4, device="cuda"))
        loss = out.float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = diagnose(model, step, steps=4)
    assert report.ok and report.event is not None and report.event.benign and report.event.kind == "inf"


def test_a_healthy_program() -> None:
    assert found(model_with(torch.tanh, torch.float16), lambda i: torch.ones(2, 4).half()) is None
