"""OverflowCallback with the Trainer of Lightning, under both of its names, and the plain scope with Fabric."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mldebug.numerics import DebugUnderflowOverflow, NumericsError
from mldebug.numerics.frameworks._callback import OverflowCallback

from .kit import INF, NAN, Net, agrees, bits, hooks_now


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def lit(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """One of the two packages, and a module of parts: its training_step calls no module as a whole."""
    package = importlib.import_module(request.param)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)

    class Parts(package.LightningModule):
        def __init__(self, spoil: int = -1, boom: int = -1, bad_loss: int = -1) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.head = nn.Linear(16, 1)
            self.plan = spoil, boom, bad_loss
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> Any:
            spoil, boom, bad_loss = self.plan
            if index == boom:
                raise KeyError("boom")
            hidden = self.encoder(batch[0])
            if index == spoil:
                hidden = hidden * INF
            loss = (self.head(hidden) - batch[1]).pow(2).mean() * (NAN if index == bad_loss else 1.0)
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.head(self.encoder(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    yield SimpleNamespace(package=package, Parts=Parts, name=request.param)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def fit(lit: SimpleNamespace, tmp_path: Path) -> Callable[..., Any]:
    """Eight batches of the module above; (the trainer, the module)."""

    def run(
        callbacks: Any, plan: dict[str, int] | None = None, resume: Any = None, fp16: bool = False, **options: Any
    ) -> Any:
        torch.manual_seed(0)
        module = lit.Parts(**(plan or {}))
        inputs = torch.randn(64, 8)
        data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        given = {
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path),
        }  # fmt: skip
        if fp16:
            plugins = importlib.import_module(f"{lit.name}.plugins")
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
            options["plugins"] = [plugins.MixedPrecision("16-mixed", "cpu", scaler)]
        trainer = lit.package.Trainer(callbacks=callbacks, **{**given, **options})
        trainer.fit(module, loader, loader, ckpt_path=resume)
        return trainer, module

    return run


def test_same_bits_steps_losses_and_checkpoints(fit: Callable[..., Any], lit: SimpleNamespace, tmp_path: Path) -> None:
    before = hooks_now()
    callback = OverflowCallback()
    assert isinstance(callback, lit.package.Callback)
    saved = []
    for callbacks in ([], callback):  # a single one needs no list
        trainer, module = fit(callbacks, accumulate_grad_batches=2)
        trainer.save_checkpoint(tmp_path / "run.ckpt")
        saved.append((module.losses, bits(module), torch.load(tmp_path / "run.ckpt", weights_only=False)))
    (losses, weights, plain), (again, watched, other) = saved
    assert again == losses and watched == weights
    assert plain.keys() == other.keys() and other["callbacks"] == {}
    report = callback.report
    assert report is not None and report.ok
    assert (report.steps, report.batches) == (4, 8)
    assert [row["loss"] for row in report.history if "loss" in row] == losses[1::2]  # the last micro-batch of a step
    assert hooks_now() == before


def test_an_event_ends_fit_and_its_report_is_saved(fit: Callable[..., Any], tmp_path: Path) -> None:
    before = hooks_now()
    with pytest.raises(NumericsError) as caught:
        fit([OverflowCallback()], {"spoil": 3})
    agrees(caught.value.report.event, step=3, module="head", kind=("nan", "inf"), phase="forward")
    saved = json.loads((tmp_path / "overflow_report.json").read_text())
    assert saved["event"]["step"] == 3
    assert hooks_now() == before


def test_a_loss_of_training_step_is_seen_before_the_step(fit: Callable[..., Any]) -> None:
    callback = OverflowCallback(folder="")
    with pytest.raises(NumericsError) as caught:
        fit([callback], {"bad_loss": 2})
    agrees(caught.value.report.event, step=2, module=None, role="loss", kind="nan")


def test_another_exception_leaves_nothing(fit: Callable[..., Any]) -> None:
    before = hooks_now()
    callback = OverflowCallback()
    with pytest.raises(KeyError, match="boom"):
        fit([callback], {"boom": 5})
    assert hooks_now() == before
    assert callback.report is not None and callback.report.event is None and callback.report.steps == 5


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_loss_scale_that_is_looked_for_is_benign(fit: Callable[..., Any], clip: float | None) -> None:
    plain = fit([], fp16=True, gradient_clip_val=clip)[1]
    callback = OverflowCallback()
    module = fit([callback], fp16=True, gradient_clip_val=clip)[1]
    report = callback.report
    assert module.losses == plain.losses
    assert report is not None and report.ok and report.event is not None and report.event.benign
    assert report.event.loss_scale == 2.0**22 and report.history[0]["loss"] == pytest.approx(module.losses[0])


def test_fabric_takes_the_plain_scope(lit: SimpleNamespace) -> None:
    if lit.name == "pytorch_lightning":
        fabric = importlib.import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    else:
        fabric = importlib.import_module("lightning").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    losses, events = [], []
    before = hooks_now()
    for watched in (False, True):
        torch.manual_seed(0)
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-3))
        recorder = DebugUnderflowOverflow(model, on_event="warn") if watched else None
        losses.append([])
        for i in range(4):
            net.plant.value = INF if i == 3 else None
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            losses[-1].append(str(loss.item()))
        if recorder is not None:
            recorder.stop(None)
            assert recorder.report.steps == 4
            events.append(recorder.report.event)
    assert losses[0] == losses[1]
    agrees(events[0], step=3, kind="inf")
    assert events[0].module.endswith("plant")
    assert hooks_now() == before
