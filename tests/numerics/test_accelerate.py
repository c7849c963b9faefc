"""The plain scope in a loop with accelerate: prepare() wraps the model, accumulation, mixed precision."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from mldebug.numerics import DebugUnderflowOverflow, NumericsError

from .kit import INF, Net, agrees, hooks_now


@pytest.fixture(scope="module")
def accelerate() -> ModuleType:
    import accelerate
    import accelerate.state

    return accelerate


def loop(
    accelerate: ModuleType, watched: bool, prepared: bool = True, precision: str = "bf16", scaler: Any = None,
    plant_at: int = -1, gain: float = 1.0, **options: Any,
) -> tuple[list[float], Any]:  # fmt: skip
    """Three steps of two micro-batches; the recorder is given what prepare() returned, or the model itself."""
    _forget(accelerate)  # of a Trainer, in another test
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    accelerator.scaler = scaler
    net = Net()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(18, 4)), batch_size=3)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-3), data)
    recorder = DebugUnderflowOverflow(model if prepared else net, **options) if watched else None
    losses = []
    try:
        for i, (batch,) in enumerate(loader):
            net.plant.value = INF if i == plant_at else None
            with accelerator.accumulate(model):
                loss = model(batch).float().pow(2).mean() * gain
                accelerator.backward(loss)
                if accelerator.sync_gradients and scaler is None:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        if recorder is not None:
            recorder.stop(None)
        _forget(accelerate)
    return losses, recorder and recorder.report


def _forget(accelerate: ModuleType) -> None:
    """Accelerate keeps the choices of the first Accelerator of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("prepared", [True, False])
def test_same_losses_and_steps_of_the_optimizer(accelerate: ModuleType, prepared: bool) -> None:
    before = hooks_now()
    plain, _ = loop(accelerate, False)
    losses, report = loop(accelerate, True, prepared)
    assert losses == plain
    assert report.ok and (report.steps, report.batches) == (3, 6)
    assert hooks_now() == before


def test_the_micro_batch_is_named(accelerate: ModuleType) -> None:
    with pytest.raises(NumericsError) as caught:
        loop(accelerate, True, plant_at=3)
    agrees(caught.value.report.event, step=1, micro_batch=1, module="plant", kind="inf")


def test_its_scaler_that_looks_for_a_scale_is_benign(accelerate: ModuleType) -> None:
    """fp16 of accelerate needs a GPU; its loop takes a scaler that is put there by hand."""
    made = []
    for watched in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        made.append(loop(accelerate, watched, precision="no", scaler=scaler, gain=1e3))
    (plain, _), (losses, report) = made
    assert losses == plain
    assert report.ok and report.event is not None and report.event.benign and report.steps == 3
