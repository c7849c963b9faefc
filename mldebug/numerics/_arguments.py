"""The arguments of the recorder, checked before anything is attached."""

from __future__ import annotations

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
    if on_step is not None and not callable(on_step):
        raise UsageError(f"on_step is {on_step!r}", hint="give a function of the step and its numbers")
    if not callable(on_event) and on_event not in ("raise", "warn", "skip"):
        raise UsageError(f"on_event is {on_event!r}", hint='use "raise", "warn", "skip" or a function of the Event')


def batches(value: Any) -> frozenset[int]:
    """The numbers of `trace_batch_nums`."""
    try:
        return frozenset(int(number) for number in value or ())
    except (TypeError, ValueError):
        raise UsageError(f"trace_batch_nums is {value!r}", hint="give batch numbers: trace_batch_nums=[1, 3]") from None
