"""-inf that a model computes and returns, and that its loss turns into bad gradients: the model is to blame."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mldebug


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(1 - torch.tanh(x * 1e4) ** 2)


class Two(nn.Module):
    """Returns a -inf that the loss does not use, and a value that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.log = nn.Linear(4, 4), Log()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.fc(x)
        return self.log(y), y


def watched(net: nn.Module, loss_of: object) -> mldebug.Event | None:
    assert callable(loss_of)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with mldebug.DebugUnderflowOverflow(net, on_event="warn") as recorder:
        optimizer.zero_grad()
        loss_of(net(torch.randn(2, 4))).backward()
        optimizer.step()
    return recorder.report.event


def test_a_log_of_zero_that_the_loss_squares() -> None:
    torch.manual_seed(0)
    event = watched(nn.Sequential(nn.Linear(4, 4), Log()), lambda out: out.pow(2).mean())
    assert event is not None and event.operation is not None
    assert (event.phase, event.module, event.kind, event.op) == ("forward", "1", "inf", "aten.log")
    assert (event.operation.cause, event.again) == ("log of zero", "shown")


def test_a_bad_loss_beside_it_stays_outside() -> None:
    torch.manual_seed(0)
    event = watched(Two(), lambda out: torch.sqrt(out[1] * 0).sum() + (out[0] > 0).sum())
    assert event is not None
    assert (event.phase, event.module, event.role) == ("backward", None, "gradient")
