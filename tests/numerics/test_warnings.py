"""Warnings point at the user's own line, whatever lies between it and the recorder."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow
from mldebug.numerics import NumericsWarning

from . import kit
from .kit import NAN, Net


def line_of(call: Callable[[], Any]) -> str:
    """The line that the first warning of the recorder points at."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    # A test before this one may have compiled something, which is a warning of its own.
    first = next(w for w in seen if w.category is NumericsWarning and "compiled before" not in str(w.message))
    assert first.filename in (__file__, kit.__file__)
    return linecache.getline(first.filename, first.lineno)


@pytest.mark.parametrize("check", ["step", "each"])
def test_an_event(check: Any) -> None:
    net = Net()
    net.plant.value = NAN
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def run() -> None:
        with DebugUnderflowOverflow(net, on_event="warn", check=check):
            net(torch.ones(2, 4)).mean().backward()
            optimizer.step()  # the step

    assert ("self.fc2(self.plant(" if check == "each" else "# the step") in line_of(run)


class Inner(nn.Module):
    """Runs a layer, whose output overflows soon."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False).half()
        nn.init.constant_(self.layer.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_an_overflow_ahead() -> None:
    model = Inner()

    def run() -> None:
        with DebugUnderflowOverflow(model), torch.no_grad():
            model(torch.full((1, 2), 5000.0, dtype=torch.float16))  # 20,000 of 65,504

    assert "20,000 of 65,504" in line_of(run)


def test_a_pattern_that_matches_nothing() -> None:
    def run() -> None:
        DebugUnderflowOverflow(Net(), exclude="nope").remove()  # constructed here

    assert "constructed here" in line_of(run)


def test_a_forward_without_gradients_and_a_scope_that_ends() -> None:
    net = Net()

    @DebugUnderflowOverflow(net, on_event="warn")
    def run() -> None:
        net.plant.value = NAN
        with torch.no_grad():
            net(torch.ones(2, 4))  # read at its end

    assert "read at its end" in line_of(run)

    @DebugUnderflowOverflow(net, on_event="warn", check="async")
    def again() -> None:
        net(torch.ones(2, 4))

    def run_again() -> None:
        again()  # the call of the scope

    assert "the call of the scope" in line_of(run_again)
