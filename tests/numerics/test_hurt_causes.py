"""Causes of special functions, and of a BatchNorm whose running variance is negative."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

import mldebug


class Part(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def cause(function: Callable[[Tensor], Tensor]) -> tuple[str, str]:
    """(op, cause) of a step through a linear layer and `function`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Part(function))

    def step(i: int) -> Tensor:
        loss: Tensor = net(torch.randn(2, 4)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    event = mldebug.diagnose(net, step, steps=1).event
    assert event is not None and event.operation is not None and event.module == "1"
    return str(event.op), event.operation.cause


def behind_where(x: Tensor) -> Tensor:
    zero = relu(x - 100)
    return torch.where(zero > 0, torch.lgamma(zero), torch.zeros_like(zero)) + x


BATCH_NORM = "negative running variance"
CASES = {
    "lgamma": (lambda x: torch.lgamma(relu(x - 100)), "aten.lgamma", "pole of the gamma function"),
    "digamma": (lambda x: torch.digamma(x * 0 - 2), "aten.digamma", "pole of the gamma function"),
    "polygamma": (lambda x: torch.polygamma(1, relu(x - 100)), "aten.polygamma", "pole of the gamma function"),
    "lgamma behind where": (behind_where, "LgammaBackward0", "gradient of the gamma function at a pole"),
    "atanh": (lambda x: torch.atanh(torch.tanh(x * 1e4)), "aten.atanh", "edge of the domain"),
    "erfinv": (lambda x: torch.erfinv(x.sign()), "aten.erfinv", "edge of the domain"),
    "erfinv beyond": (lambda x: torch.erfinv(x.sign() * 2), "aten.erfinv", "beyond the domain"),
    "large lgamma": (lambda x: torch.lgamma(x.abs() + 1e38), "aten.lgamma", "overflow"),
}


@pytest.mark.parametrize("name", CASES)
def test_special_functions(name: str) -> None:
    function, op, wanted = CASES[name]
    assert cause(function) == (op, wanted)


def test_batch_norm_in_evaluation() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3)).eval()
    net[0].running_var[1] = -0.5
    event = mldebug.diagnose(net, lambda i: net(torch.randn(4, 3)).mean(), steps=1).event
    assert event is not None and event.operation is not None
    assert (event.module, event.operation.cause) == ("0", BATCH_NORM)
