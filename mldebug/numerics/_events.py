"""Turns what was found (a record, a live tensor, a gradient) into an Event."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mldebug.core.world import world
from mldebug.numerics._event import Event, Kind, Phase, Role
from mldebug.numerics._frames import Finding
from mldebug.numerics._records import Call, Site, Watched
from mldebug.numerics._stats import LIMIT, Stats, finite_absmax
from mldebug.numerics._weights import BadBuffer, full_name, join_name

if TYPE_CHECKING:
    from mldebug.numerics._gradients import GradientNorms
    from mldebug.numerics._recorder import DebugUnderflowOverflow


class Events:
    """Makes the events of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder

    def from_record(self, site: Site, stats: Stats, call: Call) -> Event:
        """The event of a bad record."""
        if site.role not in ("parameter", "buffer"):
            return self._make(site.owner, site.role, site.path, stats, call, site.dtype)
        phase: Phase = "init"
        step = call.step
        if full_name(site) not in call.new_names:
            # Good at the pass before: the step between the two made it.
            step = call.step if call.same_step else max(call.step - 1, 0)
            phase = "forward" if site.role == "buffer" else self._phase_of_update(step)
        name = full_name(site)
        return self._make(site.owner, site.role, site.path, stats, call, site.dtype, phase=phase, step=step, param=name)

    def from_finding(self, finding: Finding, call: Call) -> Event:
        """The event of a live tensor."""
        return self._make(
            finding.owner, finding.role, finding.name, finding.stats, call, finding.tensor.dtype,
            param=finding.param, tensor=finding.tensor,
        )  # fmt: skip

    def from_buffer(self, name: str, bad: BadBuffer, call: Call) -> Event:
        """The event of a buffer that was bad before, and from which something bad has now followed."""
        stats = Stats(math.nan, math.nan) if bad.kind == "nan" else Stats(math.inf, math.inf)
        return self._make(
            bad.owner, "buffer", bad.name, stats, call, bad.dtype, phase="init", step=bad.step, param=name
        )

    def from_gradients(self, norms: GradientNorms) -> Event | None:
        """What the gradients of a step show: one that is not finite, or one that has underflowed."""
        kind: Kind
        if (bad := norms.bad()) is not None:
            owner, name, norm = bad
            kind = "nan" if norm != norm else "inf"
        elif (zero := norms.underflow()) is not None:
            (owner, name), kind = zero, "underflow"
        else:
            return None
        forwards = self._recorder.forwards
        param = self._recorder.weights.find(join_name(owner.name, name))
        dtype = torch.float16 if kind == "underflow" else torch.float32 if param is None else param.dtype
        return Event(
            step=norms.step,
            batch=max(forwards.batches - 1, 0),
            micro_batch=max(forwards.micro_batch - 1, 0),
            phase="backward",
            module=owner.name,
            module_class=owner.cls,
            role="gradient",
            kind=kind,
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            limit=LIMIT.get(dtype, math.inf),
            param=join_name(owner.name, name),
            benign=norms.scaled and kind != "underflow",
            rank=world().rank,
        )

    def nearest_to_the_loss(self, event: Event) -> Event:
        """Of the parameters that bad gradients spoiled, the last of the model: backward came to it first."""
        norms = self._recorder.gradients.of(event.step)
        bad = None if norms is None else norms.bad()
        if bad is None:
            return event
        owner, name, _ = bad
        param = join_name(owner.name, name)
        return replace(event, module=owner.name, module_class=owner.cls, name=name, param=param)

    def _phase_of_update(self, step: int) -> Phase:
        norms = self._recorder.gradients.of(step)
        return "optimizer" if norms is None or math.isfinite(norms.total) else "backward"

    def _make(
        self, owner: Watched | None, role: Role, name: str, stats: Stats, call: Call, dtype: torch.dtype, *,
        phase: Phase = "forward", step: int | None = None, param: str | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Event:  # fmt: skip
        return Event(
            step=call.step if step is None else step,
            batch=call.batch,
            micro_batch=call.micro_batch,
            phase=phase,
            module=None if owner is None else owner.name,
            module_class="" if owner is None else owner.cls,
            role=role,
            kind="nan" if stats.has_nan else "inf",
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            limit=LIMIT.get(dtype, math.inf),
            param=param,
            rank=world().rank,
            absmax=None if tensor is None else finite_absmax(tensor),
            bad=stats.nan + stats.posinf + stats.neginf if stats.nan >= 0 else None,
            numel=None if tensor is None else tensor.numel(),
            training=call.training,
        )
