"""diagnose() and the recorder in a loop of one's own, on the programs of cases_training."""

from __future__ import annotations

import pytest
import torch

from mldebug import DebugUnderflowOverflow, diagnose

from .cases_training import BENIGN, CASES
from .kit import agrees, bits, hooks_now, watch


@pytest.mark.parametrize("name", CASES)
def test_diagnose(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps)
    if case.expect is None:
        assert report.event is None and report.ok, report.event
    else:
        agrees(report.event, **case.expect)
        assert report.ok == case.expect["benign"]


@pytest.mark.parametrize("name", CASES)
def test_the_recorder_in_a_loop(name: str) -> None:
    case = CASES[name]
    before = hooks_now()
    torch.manual_seed(0)
    model, step = case.make()

    def run() -> None:
        for i in range(case.steps):
            step(i)

    report = watch(model, run)
    assert hooks_now() == before
    if case.own is None:
        assert report.event is None and report.ok and not report.trends, (report.event, report.trends)
    else:
        agrees(report.event, **case.own)
        assert report.ok == case.own.get("benign", False)
        assert report.text()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if (case.own or BENIGN)["benign"]])
@pytest.mark.parametrize("backward", [False, True])
def test_the_weights_have_the_same_bits(name: str, backward: bool) -> None:
    case = CASES[name]
    seen = []
    for watched in (False, True):
        torch.manual_seed(0)
        model, step = case.make()
        recorder = DebugUnderflowOverflow(model, backward=backward) if watched else None
        for i in range(case.steps):
            step(i)
        if recorder is not None:
            recorder.stop(None)
        seen.append(bits(model))
    assert seen[0] == seen[1]
