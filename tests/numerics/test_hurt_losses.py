"""Loops that are fine: the looks at losses and updates find nothing in them, and leave nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mldebug import DebugUnderflowOverflow

HUGE = 2.0**127 * 1.9  # a loss of 2 times this is inf


class OwnScale(torch.amp.GradScaler):
    """Scales by itself, as the scaler of FSDP does."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale


class CallsItsBase(torch.amp.GradScaler):
    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)


def made_later() -> Any:
    class Later(OwnScale):
        def scale(self, outputs: Any) -> Any:
            return OwnScale.scale(self, outputs)

    return Later


def scaled_steps(make: Callable[[], Any], bad: bool = False) -> tuple[list[Any], Any]:
    """The events of a loop whose scaled loss is inf, and that has a loss which is inf by itself when `bad`."""
    torch.manual_seed(0)
    model, events = nn.Sequential(nn.Linear(4, 3)), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with DebugUnderflowOverflow(model, on_event=events.append) as recorder:
        scaler = make()("cpu", init_scale=HUGE)
        for i in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3) * 20
            scaler.scale(loss / 0.0 if bad and i == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return events, recorder.report


@pytest.mark.parametrize("make", [lambda: OwnScale, lambda: CallsItsBase, made_later], ids=["own", "base", "later"])
def test_what_a_scaler_with_a_scale_of_its_own_makes_is_no_loss(make: Callable[[], Any]) -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.scale, OwnScale.scale, CallsItsBase.scale
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events, _ = scaled_steps(make)
    assert events == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        events, _ = scaled_steps(make, bad=True)
    assert [(event.role, event.phase, event.step) for event in events] == [("loss", "forward", 2)]
    assert (torch.autograd.backward, torch.amp.GradScaler.scale, OwnScale.scale, CallsItsBase.scale) == before
    assert "__init_subclass__" not in vars(torch.amp.GradScaler)


def test_a_complex_loss() -> None:
    model = nn.Linear(4, 1, dtype=torch.cfloat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with DebugUnderflowOverflow(model) as recorder:
            loss = model(torch.randn(5, 4, dtype=torch.cfloat)).sum()
            loss.backward(torch.ones_like(loss))
    assert recorder.report.event is None


class MasterInState(torch.optim.Optimizer):
    """Keeps a float32 copy of each weight in its state, where small updates add up."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                copy = self.state[p].setdefault("master", p.detach().float().clone())
                p.copy_(copy.add_(p.grad.float(), alpha=-group["lr"]))


class MasterApart(torch.optim.Optimizer):
    """The same, where nobody finds the copies."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.copies = {id(p): p.detach().float().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.copies[id(p)].add_(p.grad.float(), alpha=-group["lr"]))


def apart(params: Any) -> torch.optim.Optimizer:
    return MasterApart(params, 2e-5)


def fixed(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=torch.tensor(0.0))


def master(params: Any) -> torch.optim.Optimizer:
    return MasterInState(params, 1e-6)


def tiny(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=torch.tensor(1e-6))


@pytest.mark.parametrize(
    ("make", "told"),
    [(fixed, False), (master, False), (apart, False), (tiny, True)],
    ids=["0", "master", "master apart", "tiny"],
)
def test_updates_that_are_kept_elsewhere_or_are_none_do_not_round_away(make: Any, told: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 3).bfloat16()
    optimizer = make(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DebugUnderflowOverflow(model) as recorder:
            for _ in range(140):
                optimizer.zero_grad()
                out: Tensor = model(torch.randn(8, 64).bfloat16()).float()
                F.cross_entropy(out, torch.arange(8) % 3).backward()
                optimizer.step()
    assert any("round away" in note for note in recorder.report.notes) == told
