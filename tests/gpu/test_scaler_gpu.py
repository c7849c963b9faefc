"""Loss scales, gradients of outputs and optimizer states on a GPU: nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None


class Spoil(nn.Module):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Spoil.apply(x, self.factor)


def train(model: nn.Module, count: int, before: Callable[[int], None] = lambda i: None, gain: float = 1.0,
          scale: float = 0.0, quiet_from: int = -1, **options: Any) -> Any:  # fmt: skip
    """Steps with AdamW; from `quiet_from` on a wait for the device is an error. The report."""
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=scale) if scale else None
    recorder = DebugUnderflowOverflow(model, **options)
    inputs = torch.randn(16, 64, device="cuda")
    try:
        with recorder:
            for i in range(count):
                before(i)
                if 0 <= quiet_from <= i:
                    torch.cuda.set_sync_debug_mode("error")
                opt.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16, enabled=scaler is not None):
                    out = model(inputs)
                loss = out.float().pow(2).mean() * gain
                if scaler is None:
                    loss.backward()
                    opt.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(opt)
                    scaler.update()
            torch.cuda.set_sync_debug_mode("default")
        return recorder.report
    except NumericsError as error:
        return error.report
    finally:
        torch.cuda.set_sync_debug_mode("default")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Spoil(), nn.Linear(64, 64), nn.LayerNorm(64)).cuda()


def test_a_scale_that_is_looked_for_is_benign_and_one_that_collapses_is_not() -> None:
    report = train(net(), 16, scale=2.0**30)
    assert report.event is not None and report.event.benign and report.ok
    assert any(note.startswith("GradScaler skipped") for note in report.notes)
    report = train(net(), 40, scale=2.0**16, gain=1e12)
    assert report.event is not None and not report.event.benign and report.event.loss_scale == 0.5


def test_the_module_whose_backward_goes_bad_is_named() -> None:
    model = net()

    def spoil(i: int) -> None:
        model[2].factor = float("nan") if i == 3 else 1.0

    event = train(model, 8, spoil, backward=True).event
    assert event is not None
    assert (event.step, event.phase, event.module, event.kind, event.role) == (3, "backward", "2", "nan", "gradient")


def test_gradients_of_outputs_and_states_wait_for_nothing() -> None:
    """check="async" reads the verdict late; after the first steps no call of ours stops the host."""
    report = train(net(), 40, quiet_from=18, backward=True, check="async")
    assert report.ok and report.steps == 40
