"""The loss is seen wherever it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from mldebug import check, diagnose

from .kit import INF, NAN, agrees, tiny, tokens, watch


def test_a_loss_outside_any_module() -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    labels = [[0, 1], [1, 0], [-100, -100]]

    def run() -> None:
        for i in range(3):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor(labels[i]))
            assert check(loss, "loss") is loss
            loss.backward()
            opt.step()

    before = model.weight.detach().clone()
    event = watch(model, run).event
    agrees(event, step=2, phase="forward", module=None, role="loss", kind="nan", name="loss")
    assert torch.isfinite(model.weight).all() and not torch.equal(model.weight, before)


def test_check_takes_nested_values_and_needs_no_recorder() -> None:
    assert check(3.0) == 3.0
    value = {"a": [torch.ones(2), None], "b": BaseModelOutput(last_hidden_state=torch.tensor(NAN))}
    assert check(value, "heads") is value
    model = nn.Linear(4, 2)
    event = watch(model, lambda: check(value, "heads")).event
    agrees(event, kind="nan", module=None)
    assert "heads" in event.name


def test_a_loss_of_a_model_whose_parts_are_called_by_themselves() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 1)})
    opt = torch.optim.SGD(model.parameters(), 1e-3)
    events: list[Any] = []

    def run() -> None:
        for i in range(6):
            opt.zero_grad()
            y = model["head"](model["encoder"](torch.randn(3, 4)))
            loss = torch.log(y - y).mean() if i == 1 else y.mean() + (NAN if i == 3 else 0.0)
            loss.backward()
            if i not in (1, 3):
                opt.step()

    watch(model, run, on_event=events.append)
    agrees(events[0], batch=0, step=1, phase="forward", module=None, role="loss", kind="inf", op="aten.log")
    agrees(events[1], step=2, phase="forward", module=None, role="loss", kind="nan", op=None)
    assert len(events) == 2


def test_the_loss_of_a_model_output_by_itself() -> None:
    model = tiny("gpt2", dropout=0.0)
    batch = tokens()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    event = watch(model, lambda: model(**batch).loss.backward()).event  # noqa: PLW0108
    agrees(event, role="loss", kind="nan", phase="forward", module=("", None))
    assert "loss" in event.name


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"loss": x}, lambda x: (x, {"n": 1})], ids=["tensor", "dict", "tuple"]
)
def test_the_loss_that_diagnose_is_handed(wrap: Any) -> None:
    model = nn.Linear(4, 1)

    def step(i: int) -> Any:
        loss = model(torch.ones(2, 4)).mean()
        return wrap(loss * NAN if i == 2 else loss)

    agrees(diagnose(model, step, steps=4).event, step=2, role="loss", kind="nan", module=None, phase="forward")


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_python_number_as_loss(value: float) -> None:
    model = nn.Linear(4, 1)
    report = diagnose(model, lambda i: value if i == 1 else 0.5, steps=3)
    agrees(report.event, step=1, role="loss", module=None)


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
def test_a_loss_that_is_differentiated_without_backward(by_hand: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    before = torch.autograd.grad

    def run() -> None:
        for i in range(3):
            x = model(torch.randn(6, 4))
            loss = torch.log(x - x if i == 2 else x.exp()).mean()
            grads = torch.autograd.grad(loss, model.parameters())
            for p, grad in zip(model.parameters(), grads, strict=True):
                if by_hand:
                    p.data -= 1e-2 * grad
                else:
                    p.grad = grad
            if not by_hand:
                opt.step()

    event = watch(model, run).event
    assert torch.autograd.grad is before
    agrees(event, phase="forward", module=None, role="loss", op="aten.log")
    assert (event.batch, event.operation.cause) == (2, "log of zero")


@pytest.mark.parametrize(
    ("loss_of", "kind", "op", "cause"),
    [
        (lambda y: y.sum() / torch.zeros(()), ("nan", "inf"), "aten.div.Tensor", "division by zero"),
        (lambda y: (y - y).sum() / 0, "nan", "aten.div.Tensor", "division by zero"),
        (
            lambda y: (y.half() / torch.zeros(4, 1).half()).float().mean(),
            ("nan", "inf"),
            "aten.div.Tensor",
            "division by zero",
        ),
        (lambda y: (y - y).reciprocal().mean(), "inf", "aten.reciprocal", "division by zero"),
        (lambda y: torch.rsqrt(y - y).mean(), "inf", "aten.rsqrt", "division by zero"),
        (lambda y: torch.exp(y + 100).mean(), "inf", "aten.exp", "exp overflow"),
    ],
    ids=["tensor", "number", "half", "reciprocal", "rsqrt", "exp"],
)
def test_the_operation_of_a_loss_whose_operands_the_graph_does_not_keep(
    loss_of: Any, kind: Any, op: str, cause: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    event = watch(model, lambda: loss_of(model(torch.randn(4, 4))).backward(), dump_dir=str(tmp_path)).event
    agrees(event, phase="forward", module=None, role="loss", op=op, kind=kind)
    assert event.operation.cause == cause


def test_a_division_by_zero_that_comes_after_what_is_bad_is_not_it() -> None:
    model = nn.Linear(4, 2)
    event = watch(model, lambda: (torch.log(model(torch.zeros(4, 4)) * 0) / torch.zeros(())).mean().backward()).event
    agrees(event, role="loss", op="aten.log")
    event = watch(model, lambda: (model(torch.ones(4, 4)) / torch.full((), NAN)).mean().backward()).event
    agrees(event, role="loss", op="aten.div.Tensor")
    assert event.operation.victim, "it took what was bad before"


def test_what_is_differentiated_for_the_data_is_no_loss() -> None:
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), 1e-2)
    slopes = []

    def run() -> None:
        for _ in range(3):
            x = torch.zeros(6, 4, requires_grad=True)
            value = model(x)
            score = torch.log((value - value).sum())  # -inf, and only its gradient for x is looked at
            (slope,) = torch.autograd.grad(score, x, retain_graph=True)
            slopes.append(slope)
            opt.zero_grad()
            value.square().mean().backward()
            opt.step()

    assert watch(model, run).event is None and len(slopes) == 3
