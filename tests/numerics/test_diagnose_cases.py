"""diagnose() on the programs of the cases files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mldebug import diagnose

from . import cases_arithmetic, cases_values  # noqa: F401 (they enter their troubles)
from .cases import TROUBLES
from .cases_healthy import HEALTHY
from .kit import agrees, hooks_now


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble(name: str) -> None:
    case = TROUBLES[name]
    before = hooks_now()
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps)
    agrees(report.event, **{"benign": False, **case.expect})
    assert not report.ok
    assert report.to_dict()["event"]["step"] == report.event.step
    assert hooks_now() == before


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy(name: str) -> None:
    case = HEALTHY[name]
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps)
    assert report.event is None, f"alarm on a healthy program: {report.event}"
    assert report.ok


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_is_the_same_live(name: str) -> None:
    case = TROUBLES[name]
    model, step = case.make()
    event = diagnose(model, step, steps=case.steps, check="each").event
    agrees(event, step=case.expect["step"])
    if case.expect["phase"] == "forward" and case.expect["role"] == "output":
        # A lone -inf is no alarm when it is met, so a live check may see the module that it harms.
        assert event.module == case.expect["module"] or case.expect["kind"] == "inf"


def test_it_never_raises_for_an_event_and_stops_there() -> None:
    model, seen = nn.Linear(4, 1), []

    def step(i: int) -> Any:
        seen.append(i)
        return model(torch.ones(2, 4)).mean() * (float("nan") if i == 2 else 1.0)

    assert diagnose(model, step, steps=10).event.step == 2
    assert seen in ([0, 1, 2], [0, 1, 2, 3])


def test_an_exception_of_the_step_comes_through() -> None:
    before = hooks_now()

    def step(i: int) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        diagnose(nn.Linear(4, 1), step, steps=1)
    assert hooks_now() == before


def test_a_step_may_return_nothing() -> None:
    model = nn.Linear(4, 1)

    def step(i: int) -> None:
        model(torch.ones(2, 4))

    report = diagnose(model, step, steps=2)
    assert report.event is None and report.ok
