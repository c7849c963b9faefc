"""Gradients: norms in the history, underflow to zero, and the start-up of a GradScaler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, diagnose
from mldebug.numerics import NumericsWarning
from mldebug.numerics.gradients._gradients import _torch_norms

from .kit import Net, train


class Small(nn.Module):
    """Two layers in a pure float16 model; with a small loss the lower one's gradient rounds to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)
        nn.init.constant_(self.low.weight, 1.0)
        nn.init.constant_(self.high.weight, 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(torch.relu(self.low(x)))


def step_of(model: nn.Module, dtype: torch.dtype, scale: float):
    def step(i: int) -> Tensor:
        loss = (model(torch.full((4, 8), 0.01, dtype=dtype)) * scale).mean()
        loss.backward()
        return loss

    return step


def test_diagnose_names_the_layer_whose_gradient_underflows() -> None:
    model = Small().half()
    event = diagnose(model, step_of(model, torch.float16, 1e-4), steps=2).event
    assert event is not None
    assert (event.step, event.phase, event.module, event.kind) == (0, "backward", "low", "underflow")
    assert (event.role, event.param, event.benign) == ("gradient", "low.weight", False)


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e-4), (torch.bfloat16, 1e-4), (torch.float16, 100.0)])
def test_the_same_model_is_healthy_in_a_wider_dtype_or_with_a_larger_loss(dtype: torch.dtype, scale: float) -> None:
    model = Small().to(dtype)
    assert diagnose(model, step_of(model, dtype, scale), steps=2).event is None


def test_a_dead_relu_in_float16_is_no_underflow() -> None:
    model = Small().half()
    with torch.no_grad():
        model.low.weight.fill_(-1.0)
        model.high.weight.fill_(1.0)
    assert diagnose(model, step_of(model, torch.float16, 1.0), steps=2).event is None


def test_the_recorder_warns_once_and_goes_on() -> None:
    model = Small().half()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    step = step_of(model, torch.float16, 1e-4)
    with (
        pytest.warns(NumericsWarning, match=r"gradient of low\.weight is all zero in float16") as seen,
        DebugUnderflowOverflow(model) as recorder,
    ):
        for i in range(4):
            optimizer.zero_grad()
            step(i)
            optimizer.step()
    assert len([w for w in seen if "low.weight" in str(w.message)]) == 1
    assert recorder.report.event is None
    assert any("low.weight" in note for note in recorder.report.notes)


def test_a_scaler_that_looks_for_its_scale_is_benign() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(4, 8))
        loss = out.float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = diagnose(model, step, steps=10)
    assert report.event is not None and report.event.benign and report.ok
    assert report.event.phase == "backward"
    assert "GradScaler skips this step" in report.reading


def test_norms_are_those_of_the_gradients() -> None:
    torch.manual_seed(0)
    model = Net()
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=3)
        rows = recorder.report.history
    last = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert rows[-1]["grad_norm"] == pytest.approx(float(last), rel=1e-5)


class Loud(nn.Module):
    """Its gradient is `slope` everywhere: autograd is told so."""

    def __init__(self, slope: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
        self.weight.register_hook(lambda grad: torch.full_like(grad, slope))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("dtype, slope", [
    (torch.float32, 1e25), (torch.float32, 3e38), (torch.bfloat16, 1e25), (torch.float64, 1e25), (torch.float64, 1e300),
])  # fmt: skip
def test_large_gradients_are_no_infinity(dtype: torch.dtype, slope: float) -> None:
    model = Loud(slope, dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(4, 3, dtype=dtype))
        loss.backward()
        optimizer.step()
        return loss

    report = diagnose(model, step, steps=3)
    assert report.event is None
    assert [row["grad_norm"] for row in report.history] == pytest.approx([slope * 12**0.5] * 3, rel=1e-2)


@pytest.mark.parametrize("slope", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_still_named(slope: float) -> None:
    model = Loud(slope)

    def step(i: int) -> Tensor:
        loss: Tensor = model(torch.ones(4, 3))
        loss.backward()
        return loss

    event = diagnose(model, step, steps=2).event
    assert event is not None
    assert (event.step, event.param, event.kind) == (0, "weight", "nan" if slope != slope else "inf")


def test_norms_of_other_devices_need_no_look_at_the_elements() -> None:
    """What runs where there is neither a CPU nor Triton, here on the meta device: no value is read."""
    grads = [torch.ones(3, device="meta"), torch.ones(2, 2, device="meta")]
    assert _torch_norms(grads).dtype is torch.float64
    assert _torch_norms([*grads, torch.ones(2, device="meta", dtype=torch.float64)]).shape == (3,)
