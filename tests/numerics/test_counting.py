"""Steps, batches, micro-batches, passes without gradient, recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mldebug import DebugUnderflowOverflow, diagnose

from .kit import INF, NAN, Net, agrees, tiny, tokens, train, watch


def test_steps_are_optimizer_steps_and_batches_are_root_forwards() -> None:
    model = Net()
    with DebugUnderflowOverflow(model) as recorder:
        assert (recorder.step, recorder.batch_number) == (0, 0)
        train(model, steps=3)
        assert (recorder.step, recorder.batch_number) == (3, 3)
        train(model, steps=2, micro=4)
        assert (recorder.step, recorder.batch_number) == (5, 11)


@pytest.mark.parametrize("bad", range(6))
def test_micro_batches_are_counted_within_the_step(bad: int) -> None:
    model = Net()
    event = watch(model, lambda: train(model, {bad: NAN}, steps=3, micro=2)).event
    agrees(event, step=bad // 2, micro_batch=bad % 2, batch=bad, module="plant")


def test_eval_passes_move_neither_the_step_nor_the_micro_batch() -> None:
    model = Net()

    def evaluate(i: int) -> None:
        model.plant.value = None
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(2, 4))
        model.train()

    agrees(watch(model, lambda: train(model, {5: INF}, steps=4, micro=2, after=evaluate)).event, step=2, micro_batch=1)


def test_generated_tokens_are_not_micro_batches() -> None:
    model = tiny("gpt2", dropout=0.0)
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    batch = tokens()

    def run() -> None:
        for i in range(3):
            model.eval()
            model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
            model.train()
            if i == 1:
                with torch.no_grad():
                    model.transformer.h[0].mlp.c_fc.bias[0] = NAN
            opt.zero_grad()
            model(**batch).loss.backward()
            opt.step()

    events: list[Any] = []
    with DebugUnderflowOverflow(model, on_event=events.append) as recorder:
        run()
        assert recorder.step == 3
    agrees(events[0], step=1, micro_batch=0, module="transformer.h.0.mlp.c_fc")


def test_the_step_of_diagnose_is_its_argument() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 1e-2)

    def step(i: int) -> Tensor:
        for k in range(2):  # two optimizer steps per i
            model.plant.value = NAN if (i, k) == (3, 1) else None
            opt.zero_grad()
            loss = model(torch.ones(2, 4)).mean()
            loss.backward()
            opt.step()
        return loss

    agrees(diagnose(model, step, steps=5).event, step=3, module="plant", phase="forward")


def test_diagnose_without_an_optimizer_counts_too() -> None:
    model = Net()

    def step(i: int) -> Tensor:
        model.plant.value = INF if i == 2 else None
        return model(torch.ones(2, 4)).mean()

    agrees(diagnose(model, step, steps=4).event, step=2, module="plant")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Net(), reentrant
        self.head = nn.Linear(1, 1)

    @property
    def plant(self) -> nn.Module:
        return self.block.plant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_not_counted_again(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=3)
        assert (recorder.step, recorder.batch_number) == (3, 3)
    report = watch(model, lambda: train(model, {1: INF}, steps=3))
    agrees(report.event, step=1, batch=1, micro_batch=0, phase="forward", module="block.plant", role="output")
    assert sum(" block.plant Plant" in frame for frame in report.frames) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_root_under_checkpoint(reentrant: bool) -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    with DebugUnderflowOverflow(model) as recorder:
        for _ in range(3):
            opt.zero_grad()
            checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant).mean().backward()
            opt.step()
        assert (recorder.step, recorder.batch_number) == (3, 3)


def test_a_recomputation_counts_no_micro_batch() -> None:
    model = Checkpointed(False)
    agrees(watch(model, lambda: train(model, {3: NAN}, steps=3, micro=2)).event, step=1, micro_batch=1, batch=3)


def test_a_scaler_that_skips_a_step_still_counts_it() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with DebugUnderflowOverflow(model) as recorder:
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).mul(1e3).mean()).backward()
            scaler.step(opt)
            scaler.update()
        assert recorder.step == 4


def test_batches_before_attachment_do_not_count() -> None:
    model = Net()
    train(model, steps=2)
    with DebugUnderflowOverflow(model) as recorder:
        train(model, steps=1)
        assert (recorder.step, recorder.batch_number) == (1, 1)


def test_another_model_does_not_count() -> None:
    model, other = Net(), Net()
    with DebugUnderflowOverflow(model) as recorder:
        other(torch.ones(2, 4))
        assert recorder.batch_number == 0
        train(model, steps=1)
        assert recorder.batch_number == 1
