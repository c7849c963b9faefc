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
from mldebug.core.terminated import LastWord
from mldebug.numerics import _hub
from mldebug.numerics._arguments import check_step
from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._tensors import leaves
from mldebug.numerics.frameworks._transformers import watched_already
from mldebug.numerics.ops._ops import OpWatch

_Value = TypeVar("_Value")


def check(value: _Value, name: str = "loss") -> _Value:
    """Have the attached recorders look at a value made outside any module, and return it. The loss that `backward()`
    is called on is looked at without it.

    `value` is a tensor, or lists, tuples, dicts and dataclasses of tensors; what is no tensor is passed over. `name` is
    what an event calls it. It is returned as it came, the same object, its gradient untouched; nothing is read from the
    device. A bad value is told where the recorder tells of others: by a NumericsError before the optimizer's step, or
    by its `on_event`. Without a recorder it does nothing, so the line can stay.

        loss = mldebug.check(criterion(model(x), y), "loss")
    """
    for recorder in list(_hub.RECORDERS):
        recorder.guard(recorder.values.record, value, name, "loss")
    return value


def diagnose(model: nn.Module, step: Callable[[int], Any], steps: int, **options: Any) -> NumericsReport:
    """Call `step(i)` for i in range(steps) under a recorder and report the first event; stops there.

    Every operation of every step is looked at, so the operation that made the first bad value is named, with the line
    of code, its operands and its cause: `report.event.op` and `report.event.operation`. This takes about ten times as
    long as the steps alone. A compiled model runs compiled, and the forward of an event once more as it is written.
    What `step` returns (a loss, a ModelOutput, a dict of losses) is looked at too. `options` are those of
    DebugUnderflowOverflow, all but `on_event`. No hook is left.

    An event is not raised: it is `report.event`, None for a clean run. UsageError for `steps` below 1, no model, a
    `step` that is no function of one argument, or one that returns a generator or coroutine, which has not run.
    Exceptions of `step` pass through, unless an event explains them.

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
    if not _is_compiled(model):  # under a dispatch mode it would run as it is written
        recorder.ops = OpWatch(recorder)
    try:
        for i in range(steps):
            recorder.steps.set(i)
            if _one_step(recorder, step, i):
                break
        else:
            recorder.steps.set(steps)
        return recorder.report
    except NumericsError as error:
        if error.report is None:
            raise
        return error.report
    finally:
        recorder.remove()


def _is_compiled(model: nn.Module) -> bool:
    wrapper = type(model).__name__ == "OptimizedModule"
    return wrapper or any(module._compiled_call_impl is not None for module in model.modules())


def _one_step(recorder: DebugUnderflowOverflow, step: Callable[[int], Any], i: int) -> bool:
    ops = recorder.ops
    if ops is not None:
        ops.begin_step(i)
    try:
        with ops or contextlib.nullcontext():
            result = step(i)
    except NumericsError:
        raise
    except Exception:
        recorder.settle()  # raises the event that explains it, if there is one
        recorder.judge_operations()
        raise
    if inspect.isawaitable(result) or inspect.isgenerator(result):  # of a lambda, say
        raise UsageError(f"step returned a {type(result).__name__}, which has not run", "await or exhaust it in step")
    if ops is not None:
        ops.returned(result)
    for name, leaf in leaves(result, "loss"):
        if isinstance(leaf, Tensor):
            named = name.partition(".")[2]  # of a dict or a ModelOutput only what calls itself a loss is one
            role = "loss" if not named or "loss" in named else "output"
            recorder.guard(recorder.values.record, leaf, name, role)
        elif isinstance(leaf, float) and not math.isfinite(leaf):
            recorder.guard(recorder.values.record, torch.tensor(leaf), name, "loss")
    if recorder.poll() is not None:
        return True
    event = recorder.judge_operations() or recorder.judge_gradients() or recorder.judge_operations(over=True)
    return event is not None and not event.benign


def watch_script(
    argv: list[str],
    *,
    module: bool = False,
    last_word: Callable[[NumericsReport], object] | None = None,
    **options: Any,
) -> NumericsReport:
    """Run a script (or, with `module`, what `python -m` runs) with every root module watched; its report.

    `options` are those of DebugUnderflowOverflow. The script's own use of transformers' class of that name, as by
    `--debug underflow_overflow`, then adds nothing to it. Whatever the script raises passes through with the report as
    its attribute `report`. What ends the process from outside (SIGTERM; a collective that will not be complete) does
    so after `last_word` was called with the report.

        watch_script(["train.py", "--lr", "1e-3"])
    """
    recorder = DebugUnderflowOverflow(None, **options)
    recorder.quiet(warnings=False, last_word=last_word)  # the report is the caller's to show
    undo = watched_already()

    def say() -> None:
        if last_word is not None:
            recorder.finish(at_exit=True)
            last_word(recorder.report)

    try:
        with recorder, LastWord(say):
            run_script(argv, module=module)
        return recorder.report
    except BaseException as error:
        if getattr(error, "report", None) is None:
            with contextlib.suppress(AttributeError):
                error.report = recorder.report  # type: ignore[attr-defined]
        raise
    finally:
        undo()
