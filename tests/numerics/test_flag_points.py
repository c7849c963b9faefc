"""When the flag is read: before the weights can be poisoned, and never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mldebug import DebugUnderflowOverflow, NumericsError

from .kit import INF, NAN, Net, agrees, bits, train, watch

PROGRAMS = Path(__file__).parents[1] / "programs"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
}


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_not_poisoned(name: str) -> None:
    model, twin = Net(), Net()
    twin.load_state_dict(model.state_dict())
    report = watch(model, lambda: train(model, {2: NAN}, steps=4, optimizer=OPTIMIZERS[name](model.parameters())))
    agrees(report.event, step=2, module="plant")
    train(twin, steps=4, optimizer=Stop(OPTIMIZERS[name](twin.parameters()), after=2))
    assert finite(model)
    assert bits(model) == bits(twin), "the optimizer step of the bad batch has not been applied"


class Stop:
    """An optimizer that goes through `after` steps and then does nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: int) -> None:
        self.optimizer, self.left = optimizer, after

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.left -= 1
        if self.left >= 0:
            self.optimizer.step()


def scaled(
    model: nn.Module,
    opt: torch.optim.Optimizer,
    scale: float,
    plan: dict[int, float],
    steps: int = 3,
    finished: Any = None,
) -> Any:
    finished = [] if finished is None else finished
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for i in range(steps):
        model.plant.value = plan.get(i)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.ones(2, 4))
        scaler.scale(out.float().mean()).backward()
        scaler.step(opt)
        finished.append(i)
        scaler.update()
    return scaler


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaler_reads_the_flag_even_where_it_skips_the_optimizer(name: str) -> None:
    model = Net()
    opt = OPTIMIZERS[name](model.parameters())
    finished: list[int] = []
    report = watch(model, lambda: scaled(model, opt, 8.0, {1: INF}, finished=finished))
    agrees(report.event, step=1, module="plant", phase="forward", kind="inf", benign=False)
    assert finished == [0], "raised by scaler.step of the bad batch"
    assert finite(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaler_that_calibrates_is_no_trouble(name: str) -> None:
    model = Net()
    before = bits(model)
    opt = OPTIMIZERS[name](model.parameters())
    with DebugUnderflowOverflow(model) as recorder:
        scaler = scaled(model, opt, 2.0**24, {}, steps=12)
        assert recorder.step == 12
    assert scaler.get_scale() < 2.0**24, "some steps were skipped"
    assert recorder.report.event is None or recorder.report.event.benign
    assert finite(model) and bits(model) != before


def test_scaler_without_overflow() -> None:
    model = Net()
    opt = torch.optim.AdamW(model.parameters())
    assert watch(model, lambda: scaled(model, opt, 8.0, {})).event is None


def test_accumulation_raises_at_the_step_of_the_bad_micro_batch() -> None:
    model = Net()
    report = watch(model, lambda: train(model, {5: NAN}, steps=3, micro=4))
    agrees(report.event, step=1, micro_batch=1, batch=5)
    assert finite(model)


def test_lbfgs() -> None:
    model = Net()
    opt = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls: list[int] = []

    def closure() -> Tensor:
        opt.zero_grad()
        calls.append(len(calls))
        model.plant.value = NAN if done == 1 else None
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        return loss

    done = 0

    def run() -> None:
        nonlocal done
        for i in range(3):
            done = i
            opt.step(closure)

    agrees(watch(model, run).event, step=1, module="plant", kind="nan")


def test_two_optimizers_over_one_model() -> None:
    model = Net()
    first = torch.optim.SGD(model.fc1.parameters(), 1e-2)
    second = torch.optim.AdamW(model.fc2.parameters(), 1e-2)

    def run() -> None:
        for i in range(3):
            model.plant.value = NAN if i == 2 else None
            first.zero_grad(), second.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            first.step()
            second.step()

    report = watch(model, run)
    agrees(report.event, module="plant", batch=2)
    assert finite(model)


def test_optimizer_in_backward() -> None:
    model = Net()
    optimizers = {p: torch.optim.SGD([p], 1e-2) for p in model.parameters()}

    def apply(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(apply) for p in model.parameters()]

    def run() -> None:
        for i in range(4):
            model.plant.value = NAN if i == 2 else None
            model(torch.ones(2, 4)).mean().backward()

    report = watch(model, run)
    for handle in handles:
        handle.remove()
    agrees(report.event, module="plant", batch=2)
    assert finite(model)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_forward_without_gradient_raises_at_its_end(no_grad: Any) -> None:
    model = Net().eval()
    model.plant.value = INF
    with DebugUnderflowOverflow(model) as recorder, pytest.raises(NumericsError), no_grad():
        model(torch.ones(2, 4))
    agrees(recorder.report.event, module="plant", kind="inf")


def test_pending_at_the_next_root_forward() -> None:
    model = Net()
    with DebugUnderflowOverflow(model):
        model.plant.value = NAN
        model(torch.ones(2, 4)).mean().backward()
        with pytest.raises(NumericsError) as caught:
            model(torch.ones(2, 4))
    agrees(caught.value.report.event, step=0, batch=0, module="plant")


def test_pending_at_the_end_of_the_scope() -> None:
    model = Net()
    model.plant.value = NAN
    with pytest.raises(NumericsError) as caught, DebugUnderflowOverflow(model):
        model(torch.ones(2, 4)).mean().backward()
    agrees(caught.value.report.event, step=0, module="plant")


def test_a_pending_event_does_not_hide_the_users_own_exception() -> None:
    model = Net()
    model.plant.value = NAN
    recorder = DebugUnderflowOverflow(model)
    with pytest.raises(KeyError), recorder:
        model(torch.ones(2, 4)).mean().backward()
        raise KeyError("mine")
    agrees(recorder.report.event, module="plant")


def test_poll_reads_the_flag_now() -> None:
    model = Net()
    with DebugUnderflowOverflow(model, on_event="warn") as recorder:
        model(torch.ones(2, 4))
        recorder.poll()
        assert recorder.report.event is None
        model.plant.value = NAN
        model(torch.ones(2, 4))
        recorder.poll()
        agrees(recorder.report.event, module="plant", batch=1)


def test_pending_at_the_end_of_the_process(run_python: Any) -> None:
    done = run_python(PROGRAMS / "pending_at_exit.py", timeout=110)
    text = done.stdout + done.stderr
    assert "the script ended" in text
    assert "Detected inf/nan during batch_number=0" in text
    assert " 1 Exp" in text


def test_async_reads_one_step_late() -> None:
    model = Net()
    reached: list[int] = []
    report = watch(model, lambda: train(model, {1: NAN}, steps=6, after=reached.append), check="async")
    agrees(report.event, step=1, module="plant", kind="nan")
    assert reached[-1] in (0, 1, 2), "not more than one step late"


def test_async_loses_nothing_at_the_end() -> None:
    model = Net()
    agrees(watch(model, lambda: train(model, {2: NAN}, steps=3), check="async").event, step=2, module="plant")


def test_each_raises_inside_the_forward() -> None:
    model = Net()
    model.plant.value = NAN
    called: list[int] = []
    model.fc2.register_forward_pre_hook(lambda m, x: called.append(1))
    with DebugUnderflowOverflow(model, check="each"), pytest.raises(NumericsError) as caught:
        model(torch.ones(2, 4))
    agrees(caught.value.report.event, module="plant", role="output")
    assert caught.value.report.frames_from == "live"
    assert called == []
