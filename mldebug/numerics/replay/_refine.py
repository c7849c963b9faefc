"""An event of the recorder, which looks at what modules return, with the operation behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mldebug.numerics._events import Events, operation_of
from mldebug.numerics._frames import PREFIX

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._weights import Weights
    from mldebug.numerics.ops._ops import OpWatch
    from mldebug.numerics.replay._found import Found


def refined(found: Found, ops: OpWatch, events: Events, weights: Weights) -> Found:
    """The event with what the watch over operations knows of it. Weights that were bad from the start need nothing."""
    event = found.event
    if event.operation is not None or event.phase == "init" or event.kind == "underflow":
        return found
    data = event.role == "input" and event.module == "" and " of " not in event.name
    if data or (event.role == "buffer" and event.phase == "forward"):
        tensor = None if event.param is None else weights.find(event.param)
        of_it = ops.fed.get(event.name) if data else ops.wrote or (None if tensor is None else ops.made(tensor))
        if of_it is None:
            return found
        event = replace(event, op=of_it.op, operation=operation_of(of_it))
        return replace(found, event=event, call=of_it.again or of_it.not_kept)
    origin, victim = ops.verdict(), ops.victim
    if origin is not None and not (victim is not None and victim.number < origin.number):
        made = events.from_origin(origin)
        if made.phase == event.phase == "forward" and made.module == event.module and event.role != "input":
            made = replace(made, role=event.role, name=event.name)
        event = made
        return replace(found, event=event, frames=up_to(event, found.frames), call=origin.again or origin.not_kept)
    if victim is not None and event.phase == "forward":
        operation = operation_of(victim)
        op = None if victim.sort == "written" else operation.op  # a constant is nobody's mistake in computing
        return replace(found, event=replace(event, op=op, operation=operation))
    return found


def up_to(event: Event, frames: list[str]) -> list[str]:
    """The frames without those of modules that ran after the operation."""
    head = f"{PREFIX} {event.module} {event.module_class}"
    at = [i for i, frame in enumerate(frames) if head in frame.splitlines()]
    return frames[: at[-1] + 1] if at else frames
