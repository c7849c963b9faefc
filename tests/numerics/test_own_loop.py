"""What the recorder sees in a loop of one's own beyond what modules return: losses, updates, the last step."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mldebug import DebugUnderflowOverflow
from mldebug.numerics import NumericsWarning

from . import cases_reports  # noqa: F401 (it enters its cases)
from .cases_ops import OP_TROUBLES
from .kit import INF, NAN, Net, agrees, bits, train, watch

MASK = torch.tensor([[False, False, True]])


def steps(
    model: nn.Module, loss_of: Callable[[Tensor, int], Tensor], count: int = 3, opt: Any = None, **options: Any
) -> Any:
    """The report of a plain loop whose loss is a function of what the model returns and of the step."""
    optimizer = opt or torch.optim.SGD(model.parameters(), 1e-2)
    dtype = next(model.parameters()).dtype

    def run() -> None:
        for i in range(count):
            optimizer.zero_grad()
            loss_of(model(torch.ones(2, 4, dtype=dtype)), i).backward()
            optimizer.step()

    return watch(model, run, **options)


def masked_class(out: Tensor, i: int) -> Tensor:
    return F.cross_entropy(out.masked_fill(MASK, -INF), torch.tensor([0, 2 if i == 1 else 1]))


def beyond_half(out: Tensor, i: int) -> Tensor:
    return F.mse_loss(out, torch.full_like(out, 300.0 if i == 1 else 1.0))


def log_of_a_label(out: Tensor, i: int) -> Tensor:
    p = torch.tensor([[1.0, 0.0, 0.0]]) if i == 1 else torch.full((1, 3), 1 / 3)
    return (p * (torch.log(p) - torch.log_softmax(out, -1))).sum()


def nothing_chosen(out: Tensor, i: int) -> Tensor:
    return out[torch.tensor([i != 1, False])].mean()


def by_hand(out: Tensor, i: int) -> Tensor:
    p = torch.sigmoid(out * (1e4 if i == 1 else 1.0))
    return -(torch.log(p) * torch.log(1 - p)).mean()


def bad_label(out: Tensor, i: int) -> Tensor:
    return F.mse_loss(out, torch.full_like(out, NAN if i == 1 else 1.0))


def unknown(out: Tensor, i: int) -> Tensor:
    return out.pow(2).mean() + (INF if i == 1 else 0.0)


def steep(out: Tensor, i: int) -> Tensor:
    return torch.exp(out.pow(2).mean() + (1000.0 if i == 1 else 0.0))


@pytest.mark.parametrize(
    ("loss_of", "kind", "op", "cause"),
    [
        (masked_class, "inf", "aten.nll_loss_forward", "label of a masked class"),
        (beyond_half, "inf", "aten.mse_loss", "square overflow"),
        (log_of_a_label, "nan", None, ""),
        (nothing_chosen, "nan", "aten.mean", "empty mean"),
        (by_hand, "inf", "aten.log", "log of zero"),
        (bad_label, "nan", "aten.mse_loss", ""),
        (unknown, "inf", None, ""),
        (steep, "inf", "aten.exp", "exp overflow"),
    ],
    ids=["masked class", "beyond half", "log of a label", "nothing chosen", "by hand", "bad label", "unknown", "steep"],
)
def test_a_bad_loss(loss_of: Any, kind: str, op: str | None, cause: str) -> None:
    """Also one whose gradients are finite; its graph may keep what the operation was given."""
    model = nn.Linear(4, 3).to(torch.float16 if loss_of is beyond_half else torch.float32)
    report = steps(model, loss_of)
    agrees(report.event, step=1, micro_batch=0, phase="forward", module=None, role="loss", kind=kind, benign=False)
    operation = report.event.operation
    assert (report.event.op, "" if operation is None else operation.cause) == (op, cause)
    assert (operation is not None and operation.victim) == (loss_of is bad_label)
    assert math.isfinite(report.history[0]["loss"])
    assert all(torch.isfinite(p).all() for p in model.parameters())  # it stopped before the step


def test_the_operation_of_a_loss_can_be_run_without_the_model(tmp_path: Path) -> None:
    steps(nn.Linear(4, 3), masked_class, dump_dir=tmp_path)
    found = subprocess.run(
        [sys.executable, tmp_path / "step1-rank0" / "repro.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 1 and "aten.nll_loss_forward" in found.stdout, found.stderr


def test_the_losses_of_micro_batches_are_told_apart() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def run() -> None:
        for i in range(2):
            optimizer.zero_grad()
            for j in range(3):
                (masked_class(model(torch.ones(2, 4)), 1 if (i, j) == (1, 1) else 0) / 3).backward()
            optimizer.step()

    agrees(watch(model, run).event, step=1, batch=4, micro_batch=1, role="loss", kind="inf")


@pytest.mark.parametrize("check", ["step", "async", "each"])
def test_a_loss_of_a_bad_forward_is_no_second_event(check: Any) -> None:
    events: list[Any] = []
    model = Net()
    with DebugUnderflowOverflow(model, check=check, on_event=events.append):
        train(model, {2: NAN}, steps=3)
    assert [(event.step, event.module) for event in events] == [(2, "plant")]


def test_a_loss_counts_without_its_scale() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def run(bad: float) -> Callable[[], None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)

        def loop() -> None:
            for i in range(3):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).mean() * 0 + (bad if i == 1 else 1e20)).backward()  # inf if scaled
                scaler.step(optimizer)
                scaler.update()

        return loop

    assert watch(model, run(1e20)).event is None
    agrees(watch(model, run(NAN)).event, step=1, role="loss", kind="nan", benign=False)


def test_the_loss_of_another_model_is_none_of_its_business() -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)

    def loss_of(out: Tensor, i: int) -> Tensor:
        (other(torch.ones(2, 4)).sum() * NAN).backward()
        return out.sum()

    assert steps(model, loss_of).event is None


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bad = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return torch.log10(F.relu(self.fc(x)) * (0.0 if self.bad else 1.0) + (0.0 if self.bad else 1.0))


def test_minus_infinity_that_the_model_returned_is_behind_the_loss() -> None:
    model = Log()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def run() -> None:
        for i in range(2):
            model.bad = i == 1
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()  # its gradients are zero, by relu
            optimizer.step()

    report = watch(model, run)
    agrees(report.event, step=1, phase="forward", module="", role="output", kind="inf", op="aten.log10", again="shown")
    assert report.event.operation.cause == "log of zero"


@pytest.mark.parametrize(
    ("cause", "make"),
    [
        ("learning rate", lambda model: torch.optim.SGD(model.parameters(), INF)),
        ("update beyond the range", lambda model: torch.optim.SGD(model.parameters(), 3e38)),
        ("eps too small", lambda model: torch.optim.Adam(model.half().parameters(), 1e-3, foreach=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_parameter_that_the_last_step_spoils(cause: str, make: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(model)
    # With all of a row of gradients zero, so are the averages of their squares.
    report = steps(model, lambda out, i: out[:, 0].float().sum() * 4, count=1, opt=optimizer)
    agrees(report.event, step=0, batch=0, phase="optimizer", role="parameter", cause=cause, again="", op=None)
    assert report.hint and report.hint in report.text().replace("\n      ", " ")


def test_a_last_step_by_hand() -> None:
    model = nn.Linear(4, 2)

    def run() -> None:
        model(torch.ones(2, 4)).sum().backward()
        for p in model.parameters():
            p.data -= INF * p.grad

    agrees(watch(model, run).event, step=0, phase="optimizer", role="parameter", kind="inf")


def test_optimizers_that_take_turns_make_one_step() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x, name: model[name](x)  # type: ignore[method-assign]
    optimizers = {name: torch.optim.SGD(part.parameters(), 1e-2) for name, part in model.items()}
    with DebugUnderflowOverflow(model) as recorder:
        for i in range(4):
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                model(torch.ones(2, 4), name).mean().backward()
                optimizer.step()
            assert recorder.step == i + 1


@pytest.mark.parametrize(("rate", "lost"), [(1e-6, True), (1e-2, False)])
def test_updates_that_round_away_are_noted(rate: float, lost: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 64).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = steps(model, lambda out, i: (out.float() - i % 2).pow(2).mean(), count=130, opt=optimizer)
    notes = [note for note in report.notes if note.startswith("updates round away: of the bfloat16 weights")]
    assert bool(notes) == lost and report.event is None
    assert sum(issubclass(one.category, NumericsWarning) for one in caught) == int(lost)


def test_gradients_of_gradients_are_not_said_to_be_a_fault_of_the_hardware() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(model[0].bias, -100.0)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def run() -> None:
        x = torch.ones(4, 4, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.pow(2).sum(1).sqrt() - 1).pow(2).mean()).backward()
        optimizer.step()

    report = watch(model, run, exclude=["1"])  # then the code after the model is not watched either
    agrees(report.event, step=0, phase="backward", kind="nan", again="not replayable")
    assert "differentiated again" in report.not_replayed


class Centre(nn.Module):
    """Puts a new tensor in the place of its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("centre", torch.ones(4))
        self.divisor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.centre = self.centre / self.divisor
        return self.fc(x) - self.centre.sum() * 1.0


@pytest.mark.parametrize("divisor", [2.0, 0.0])
def test_a_buffer_that_the_forward_replaces_is_put_back_for_a_replay(divisor: float) -> None:
    model, plain = Centre(), Centre()
    plain.load_state_dict(model.state_dict())
    plant = nn.Linear(4, 4)
    whole = nn.Sequential(model, plant)
    model.divisor = plain.divisor = divisor
    events: list[Any] = []
    with DebugUnderflowOverflow(whole, on_event=events.append):
        out = whole(torch.ones(2, 4))
        (out * (NAN if divisor else 1.0)).sum().backward()
    plain(torch.ones(2, 4))
    assert bits(model) == bits(plain)  # a replay leaves what one forward has made
    if not divisor:
        agrees(events[0], module="0", op="aten.div.Tensor", phase="forward")
        assert events[0].operation.cause == "division by zero"


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_what_other_code_did_to_a_weight_is_not_the_update(make: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(model.parameters(), 1e-3)

    def run() -> None:
        for i in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if i == 1:
                model.weight.data[0, 0] = INF

    event = watch(model, run).event
    agrees(event, step=1, phase="optimizer", role="parameter", kind="inf", cause="")


@pytest.mark.parametrize(
    "name", ["a_running_variance_of_one_sample", "a_sample_so_far_off_that_its_variance_overflows"]
)
def test_what_spoiled_a_buffer_is_named(name: str, tmp_path: Path) -> None:
    case = OP_TROUBLES[name]
    model, step = case.make()

    def run() -> None:
        for i in range(case.steps):
            step(i)

    report = watch(model, run, dump_dir=tmp_path)
    expect = {key: want for key, want in case.expect.items() if key != "cause"}
    agrees(report.event, **expect, again="shown", batch=1)
    assert report.frames_from == "replay" and "f " in "".join(report.frames)
    done = subprocess.run(
        [sys.executable, tmp_path / "step1-rank0" / "repro.py"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "nan or inf, at" in done.stdout


def test_skip_gives_a_spoiled_buffer_back() -> None:
    case = OP_TROUBLES["a_sample_so_far_off_that_its_variance_overflows"]
    model, step = case.make()
    with DebugUnderflowOverflow(model, on_event="skip") as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(case.steps):
            step(i)
    assert recorder.report.dropped_steps == [1] and bool(torch.isfinite(model.f.running_var).all())


def test_a_buffer_that_is_bad_from_the_start_and_written_in_each_forward() -> None:
    class Scratch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.full((1,), INF))

        def forward(self, x: Tensor) -> Tensor:
            self.best.copy_(torch.full((1,), INF))
            return x

    model = nn.Sequential(nn.Linear(4, 1), Scratch())
    assert watch(model, lambda: train(model, steps=3)).event is None
