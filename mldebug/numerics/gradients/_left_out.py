"""Bad batches that a program has left out by itself: their event is true, and the weights are fine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics.gradients._gradients import GradientNorms

_NAMED = 4


class LeftOut:
    """Those of one recorder. Known from the gradients that an optimizer went on to apply in the step of the event."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._waiting: dict[int, int] = {}  # step -> batch of an event

    def saw(self, event: Event, spoiled: bool) -> None:
        """An event that was told of, and whether weights were known to be `spoiled`, so that it follows from them."""
        if event.phase == "forward" and event.training and not spoiled:
            self._waiting[event.step] = event.batch

    def applied(self, norms: GradientNorms | None) -> None:
        """The gradients of a step: if they were finite, the bad batch is not in them. Waits for their copy."""
        batch = None if norms is None else self._waiting.pop(norms.step, None)
        if norms is not None and batch is not None and math.isfinite(norms.total) and len(self.notes) < _NAMED:
            self.notes.append(
                f"batch {batch}, of the event in step {norms.step}, did not reach the weights: the program left it "
                "out, and the gradients of that step were finite"
            )
