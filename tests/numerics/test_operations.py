"""diagnose() names the operation, its line and its cause; and nothing in healthy programs."""

from __future__ import annotations

from typing import Any

import pytest

from mldebug import diagnose
from mldebug.numerics.ops._causes import CAUSES

from . import cases_ops_more, cases_reports  # noqa: F401 (they enter their cases)
from .cases_ops import OP_HEALTHY, OP_TROUBLES
from .kit import agrees, hooks_now
from .test_after_the_model import BACKWARD, FORWARD, OPTIMIZERS
from .test_hurt_causes import BATCH_NORM
from .test_hurt_causes import CASES as SPECIAL

OF_THE_OPERATION = ("op", "cause", "forward_op", "code", "victim")


@pytest.mark.parametrize("name", OP_TROUBLES)
def test_trouble(name: str) -> None:
    case = OP_TROUBLES[name]
    before = hooks_now()
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps)
    expect = {"benign": False, **case.expect}
    agrees(report.event, **{key: want for key, want in expect.items() if key not in OF_THE_OPERATION})
    if expect.get("op") is not None:
        names = expect["op"] if isinstance(expect["op"], tuple) else (expect["op"],)
        assert str(report.event.op).startswith(names), f"{report.event.op} for {names}"
        of_it = report.event.operation
        for key in OF_THE_OPERATION[1:]:
            want: Any = expect.get(key)
            have = getattr(of_it, key)
            if isinstance(want, str) and key == "code":
                assert want in have
            elif want is not None:
                assert have in (want if isinstance(want, tuple) else (want,)), (
                    f"{key}: {have!r} for {want!r} in {of_it}"
                )
        assert (
            of_it.file.endswith(("cases_ops.py", "cases_ops_more.py", "cases_reports.py"))
            or expect["phase"] == "optimizer"
            or (report.event.module is None and expect["phase"] == "backward")
        )
    elif "op" in expect:
        assert report.event.op is None
    assert hooks_now() == before


def test_each_cause_has_its_case() -> None:
    wanted = [case.expect.get("cause") for case in OP_TROUBLES.values()]
    shown = {key for want in wanted if want for key in (want if isinstance(want, tuple) else (want,))}
    shown |= {cause for _, _, cause in (*BACKWARD.values(), *FORWARD.values())} | {
        cause for _, cause in OPTIMIZERS.values()
    }
    shown |= {"hook on an output", "negative variance of the optimizer"}  # each has a test of its own
    assert {cause.key for cause in CAUSES} == shown | {wanted for _, _, wanted in SPECIAL.values()} | {BATCH_NORM}
    assert all(cause.reading and cause.remedy for cause in CAUSES)


@pytest.mark.parametrize("name", OP_HEALTHY)
def test_healthy(name: str) -> None:
    case = OP_HEALTHY[name]
    model, step = case.make()
    report = diagnose(model, step, steps=case.steps)
    assert report.event is None, f"alarm on a healthy program: {report.event}"
