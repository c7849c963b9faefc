"""What the recorder sees on a GPU beyond what modules return: losses, the last step, updates that round away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mldebug import DebugUnderflowOverflow, NumericsError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INF = float("inf")


def steps(model: nn.Module, loss_of: Callable[[Tensor, int], Tensor], optimizer: Any, count: int = 3) -> Any:
    """The report of a plain loop on the GPU, whether or not it raised."""
    x = torch.ones(2, 4, device="cuda", dtype=next(model.parameters()).dtype)
    recorder = DebugUnderflowOverflow(model)
    try:
        with recorder:
            for i in range(count):
                optimizer.zero_grad()
                loss_of(model(x), i).backward()
                optimizer.step()
    except NumericsError as error:
        return error.report
    return recorder.report


def test_a_loss_whose_gradients_are_finite() -> None:
    model = nn.Linear(4, 3).cuda()
    mask = torch.tensor([[False, False, True]], device="cuda")

    def loss_of(out: Tensor, i: int) -> Tensor:
        return F.cross_entropy(out.masked_fill(mask, -INF), torch.tensor([0, 2 if i == 1 else 1], device="cuda"))

    event = steps(model, loss_of, torch.optim.SGD(model.parameters(), 1e-2)).event
    assert (event.step, event.phase, event.module, event.role, event.kind) == (1, "forward", None, "loss", "inf")
    assert torch.isfinite(model.weight).all()


def test_minus_infinity_that_the_model_returned_is_behind_the_loss() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.log10(F.relu(self.fc(x)) * 0.0)

    model = Log().cuda()
    event = steps(model, lambda out, i: out.mean(), torch.optim.SGD(model.parameters(), 1e-2)).event
    assert (event.step, event.module, event.role, event.op) == (0, "", "output", "aten.log10")


def test_the_last_step_of_a_run_is_looked_at() -> None:
    model = nn.Linear(4, 3).cuda()
    event = steps(model, lambda out, i: out.sum(), torch.optim.SGD(model.parameters(), INF), count=1).event
    assert (event.step, event.phase, event.role, event.cause) == (0, "optimizer", "parameter", "learning rate")


@pytest.mark.parametrize(("rate", "lost"), [(1e-6, True), (1e-2, False)])
def test_updates_that_round_away_are_noted(rate: float, lost: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 64).cuda().bfloat16()
    report = steps(
        model, lambda out, i: (out.float() - i % 2).pow(2).mean(), torch.optim.AdamW(model.parameters(), rate), 134
    )
    assert any(note.startswith("updates round away") for note in report.notes) == lost
    assert report.event is None
