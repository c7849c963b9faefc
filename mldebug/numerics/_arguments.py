"""The arguments of the recorder, checked before anything is attached."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from mldebug.core.errors import UsageError


def check_arguments(model: Any, max_frames: Any, check: Any, on_event: Any, on_step: Any, abort: Any) -> None:
    """UsageError for what a recorder cannot work with."""
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(
            f"DebugUnderflowOverflow needs a torch.nn.Module, got {type(model).__name__}",
            hint="pass the model itself: DebugUnderflowOverflow(model)",
        )
    if not isinstance(max_frames, int) or max_frames < 1:
        raise UsageError(
            f"max_frames_to_save is {max_frames}, it must be a whole number of at least 1", hint="the default is 21"
        )
    if check not in ("step", "async", "each"):
        raise UsageError(f"check is {check!r}", hint='use "step", "async" or "each"')
    if abort is not None and not isinstance(abort, int):
        raise UsageError(f"abort_after_batch_num is {abort!r}", hint="give a batch number, counted from 0")
    if on_step is not None and not (callable(on_step) and takes(on_step, 0, {})):
        raise UsageError(f"on_step is {on_step!r}", hint="give a function of the step and its numbers")
    if not callable(on_event) and on_event not in ("raise", "warn", "skip"):
        raise UsageError(f"on_event is {on_event!r}", hint='use "raise", "warn", "skip" or a function of the Event')
    if callable(on_event) and not takes(on_event, None):
        raise UsageError(
            f"on_event is {on_event!r}, which does not take one argument", hint="give a function of the Event"
        )


def check_step(step: Any) -> None:
    """UsageError for what diagnose() cannot call as `step(i)`, or would call for nothing."""
    hint = "give a function that trains one step: def step(i): ...; return loss"
    if isinstance(step, nn.Module) or not callable(step):
        raise UsageError(f"step is {_short(step)}, and not a function of one step", hint)
    name = getattr(step, "__name__", type(step).__name__)
    called = getattr(step, "__call__", step)  # noqa: B004  # an object may have an async __call__
    if any(is_lazy(f) for f in (step, called) for is_lazy in _LAZY):
        raise UsageError(f"{name} is async or a generator: calling it runs nothing", hint)
    if not takes(step, 0):
        raise UsageError(f"diagnose() calls {name}(i) with the number of the step, which it does not take", hint)


def takes(function: Callable[..., Any], *args: Any) -> bool:
    """Whether a function can be called so; True where nothing is known of it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are built in do not tell
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _short(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else f"{value!r}"[:60]


def batches(value: Any) -> frozenset[int]:
    """The numbers of `trace_batch_nums`."""
    try:
        return frozenset(int(number) for number in value or ())
    except (TypeError, ValueError):
        raise UsageError(f"trace_batch_nums is {value!r}", hint="give batch numbers: trace_batch_nums=[1, 3]") from None
