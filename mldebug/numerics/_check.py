"""check() and diagnose(): the two functions of the room."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mldebug.core.errors import UsageError
from mldebug.core.script import run_script
from mldebug.numerics import _hub
from mldebug.numerics._arguments import check_step
from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._tensors import leaves

_Value = TypeVar("_Value")


def check(value: _Value, name: str = "loss") -> _Value:
    """Have the attached recorders look at a value made outside any module, and return it.

    `value` is a tensor or any nest of tensors; nothing is read from the device. Without a recorder it does nothing.

        loss = mldebug.check(criterion(model(x), y), "loss")
    """
    for recorder in list(_hub.RECORDERS):
        recorder.guard(recorder.forwards.record_value, value, name, "loss")
    return value


def diagnose(model: nn.Module, step: Callable[[int], Any], steps: int, **options: Any) -> NumericsReport:
    """Call `step(i)` for i in range(steps) under a recorder and report the first event; stops there.

    What `step` returns (a loss, a ModelOutput, a dict of losses) is looked at too. `options` are those of
    DebugUnderflowOverflow. Exceptions of `step` pass through, unless an event explains them. No hook is left.

        report = mldebug.diagnose(model, step, steps=100); print(report.text())
    """
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps is {steps}", "run at least one step: diagnose(model, step, steps=10)")
    if model is None:
        raise UsageError("diagnose() has no model to watch", "diagnose(model, step, steps=10)")
    check_step(step)
    if "on_event" in options:
        raise UsageError("diagnose() has no on_event", "it returns the report; use DebugUnderflowOverflow to act on it")
    recorder = DebugUnderflowOverflow(model, on_event="raise", **options)
    recorder.quiet()
    try:
        for i in range(steps):
            recorder.set_step(i)
            if _one_step(recorder, step, i):
                break
        else:
            recorder.set_step(steps)
        return recorder.report
    except NumericsError as error:
        if error.report is None:
            raise
        return error.report
    finally:
        recorder.remove()


def _one_step(recorder: DebugUnderflowOverflow, step: Callable[[int], Any], i: int) -> bool:
    try:
        result = step(i)
    except NumericsError:
        raise
    except Exception:
        recorder.settle()  # raises the event that explains it, if there is one
        raise
    if inspect.isawaitable(result) or inspect.isgenerator(result):  # of a lambda, say
        raise UsageError(f"step returned a {type(result).__name__}, which has not run", "await or exhaust it in step")
    for name, leaf in leaves(result, "loss"):
        if isinstance(leaf, Tensor):
            named = name.partition(".")[2]  # of a dict or a ModelOutput only what calls itself a loss is one
            role = "loss" if not named or "loss" in named else "output"
            recorder.guard(recorder.forwards.record_value, leaf, name, role)
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            recorder.guard(recorder.forwards.record_value, torch.tensor(leaf), name, "loss")
    if recorder.poll() is not None:
        return True
    event = recorder.judge_gradients()
    return event is not None and not event.benign


def watch_script(argv: list[str], *, module: bool = False, **options: Any) -> NumericsReport:
    """Run a script (or, with `module`, what `python -m` runs) with every root module watched; its report.

    `options` are those of DebugUnderflowOverflow. Whatever the script raises passes through with the report as its
    attribute `report`.

        watch_script(["train.py", "--lr", "1e-3"])
    """
    recorder = DebugUnderflowOverflow(None, **options)
    recorder.quiet(warnings=False)  # the report is the caller's to show
    try:
        with recorder:
            run_script(argv, module=module)
        return recorder.report
    except BaseException as error:
        if getattr(error, "report", None) is None:
            with contextlib.suppress(AttributeError):
                error.report = recorder.report  # type: ignore[attr-defined]
        raise
