"""GradScaler in the user's own loop: an overflow of the loss scale is benign, a scale that collapses is not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mldebug.numerics._event import MANY, Event, Kind
from mldebug.numerics.ops._scale import fits

if TYPE_CHECKING:
    from mldebug.numerics.gradients._gradients import GradientNorms
    from mldebug.numerics.ops._origins import Origin
    from mldebug.numerics.replay._backward import Kept
    from mldebug.numerics.replay._found import Found
    from mldebug.numerics.replay._judge import Judge

_NAMED = 10  # skipped steps that a report names


class Scaling:
    """What a GradScaler did in one recorder's steps: the steps it skipped, and how many of them in a row."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._judged = -1  # the last step that was looked at
        self._row = 0  # steps in a row that were skipped
        self._skipped: list[int] = []  # the first of them
        self._count = 0
        self._first = self._last = 0.0  # the loss scale at the first and at the last of them

    def judge(self, norms: GradientNorms, ran: list[Kept], origin: Origin | None = None) -> Found | None:
        """The event of a step whose gradients carry a loss scale; None if they are finite.

        `ran` are the forwards of the step that can be run again, `origin` is what the code after the model has made bad
        in its backward. Waits for the copy of the norms.
        """
        if self._judged == norms.step or not norms.scaled:
            return None
        self._judged = norms.step
        if math.isfinite(norms.total) or norms.bad() is None:
            self._row = 0
            return None
        found = self._judge.from_gradients(norms)
        if found is None:
            return None
        self._row += 1
        self._note(norms)
        scale = norms.loss_scale
        event = replace(found.event, loss_scale=scale, scaled_down=self._row)
        # Below 1 it makes gradients smaller than they are: what overflows then overflows by itself.
        if outside := _came_in(ran):
            event = replace(event, module=None, module_class="", name="gradient", param=None, kind=outside)
            if origin is not None and norms.skipped and scale >= 1.0 and not fits(origin, scale):
                bad = replace(self._judge.from_origin(origin), frames=[], source="")
                return replace(bad, event=replace(_with_scale(bad.event, event), again="shown"))
        if not norms.skipped or scale < 1.0 or self._row >= MANY:
            return replace(found, event=replace(event, benign=False))
        if self._row & (self._row - 1) == 0:  # at the 1st, 2nd, 4th ... in a row: a look is a forward and a backward
            for kept in ran:
                real = self._judge.at_scale_one(kept, scale)
                if real is not None:
                    return replace(real, event=_with_scale(real.event, event))
        return replace(found, event=event)

    def said(self, steps: int) -> str:
        """One line for the report; "" if nothing was skipped."""
        if not self._count:
            return ""
        more = ", ..." if self._count > len(self._skipped) else ""
        named = ", ".join(map(str, self._skipped))
        scales = _number(self._first)
        if self._last != self._first:
            scales += f", at the last {_number(self._last)}"
        of = max(steps, self._judged + 1)
        return f"GradScaler skipped {self._count} of {of} steps: {named}{more}; loss scale at the first {scales}"

    def _note(self, norms: GradientNorms) -> None:
        if not norms.skipped:
            return
        if not self._count:
            self._first = norms.loss_scale
        self._last = norms.loss_scale
        self._count += 1
        if len(self._skipped) < _NAMED:
            self._skipped.append(norms.step)


def _came_in(ran: list[Kept]) -> Kind | None:
    """How bad the gradients were that the loss sent into the model; None if they were finite."""
    grads = [grad for kept in ran for grad in kept.grads.values() if not bool(torch.isfinite(grad).all())]
    if not grads:
        return None
    return "nan" if any(bool(torch.isnan(grad).any()) for grad in grads) else "inf"


def _number(scale: float) -> str:
    return f"{scale:.0f}" if scale >= 1.0 else f"{scale:.3g}"


def _with_scale(event: Event, of: Event) -> Event:
    return replace(event, benign=False, loss_scale=of.loss_scale, scaled_down=of.scaled_down)
