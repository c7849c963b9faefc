"""Turns what was found (a record, a live tensor, a gradient) into an Event."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mldebug.numerics._event import Event, Kind, Operation, Phase, Role
from mldebug.numerics._frames import Finding
from mldebug.numerics._weights import BadBuffer, full_name, join_name
from mldebug.numerics.distributed._together import rank_now
from mldebug.numerics.ops._causes import cause_of
from mldebug.numerics.ops._origins import NAN, Origin
from mldebug.numerics.ring._records import Call, Site, Watched
from mldebug.numerics.ring._stats import LIMIT, Stats, finite_absmax

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.gradients._gradients import GradientNorms
    from mldebug.numerics.ops._loss_graph import LossOperation


class Events:
    """Makes the events of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder

    def from_record(self, site: Site, stats: Stats, call: Call) -> Event:
        """The event of a bad record."""
        if site.role not in ("parameter", "buffer"):
            event = self._make(site.owner, site.role, site.path, stats, call, site.dtype)
            known = site.role == "input" and call.snapshot is not None and not call.snapshot.inputs_changed()
            return replace(event, sample=call.snapshot.sample(site.path)) if known and call.snapshot else event
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
            rank=rank_now(),
        )

    def from_origin(self, origin: Origin) -> Event:
        """The event of an operation that made bad values."""
        owner = origin.owner
        role: Role = "gradient" if origin.phase == "backward" else "output"
        if origin.phase == "optimizer":
            role = "parameter" if origin.param is not None else "output"
        elif origin.fed is not None:
            role, owner = "input", origin.fed.root
        elif role == "output" and owner is None:
            role = "loss"
        name: str = role if origin.fed is None else origin.fed.path
        if origin.param is not None and owner is not None:
            name = origin.param.removeprefix(f"{owner.name}.")
        return Event(
            step=origin.step,
            batch=origin.batch,
            micro_batch=origin.micro_batch,
            phase=origin.phase,
            module=None if owner is None else owner.name,
            module_class="" if owner is None else owner.cls,
            role=role,
            kind="precision" if "positions" in origin.facts else "nan" if origin.worst == NAN else "inf",
            name=name,
            dtype=str(origin.dtype).removeprefix("torch."),
            limit=LIMIT.get(origin.dtype, math.inf),
            param=origin.param,
            op=origin.op if origin.hook else origin.node or origin.op,
            benign="by the loss scale" in origin.facts,
            rank=rank_now(),
            absmax=origin.absmax,
            bad=origin.bad,
            numel=origin.numel,
            training=origin.training,
            sample=None if origin.fed is None else origin.fed.sample,
            operation=operation_of(origin),
        )

    def of_loss(self, event: Event, made: LossOperation) -> Event:
        """The event of a bad loss with the operation of its graph that made it."""
        kind: Kind = "nan" if made.kind == "nan" else "inf"
        return replace(
            event, kind=kind, op=made.operation.op, operation=made.operation, bad=None, numel=None,
            dtype=str(made.dtype).removeprefix("torch."), limit=LIMIT.get(made.dtype, math.inf),
        )  # fmt: skip

    def of_bad_gradients(self, event: Event) -> Event:
        """The event of parameters that bad gradients spoiled: at the module whose backward went bad, where gradients of
        outputs were recorded, else at the last of these parameters in the model. Backward came to it first."""
        gradients = self._recorder.output_gradients
        found = None if gradients is None else gradients.origin(event.step)
        if found is not None:
            made, kind = found
            module, cls = (None, "") if made is None else (made.name, made.cls)
            return replace(
                event, role="gradient", name="gradient", param=None, module=module, module_class=cls,
                kind="nan" if kind == "nan" else "inf",
            )  # fmt: skip
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
            rank=rank_now(),
            absmax=None if tensor is None else finite_absmax(tensor),
            bad=stats.nan + stats.posinf + stats.neginf if stats.nan >= 0 else None,
            numel=None if tensor is None else tensor.numel(),
            training=call.training,
        )


def operation_of(origin: Origin) -> Operation:
    """What a report says of an operation."""
    line = origin.line
    victim = origin.sort == "given"
    phase = "forward" if origin.by_hand else origin.phase
    cause = None if victim else cause_of(origin.op, origin.node, phase, origin.facts)
    return Operation(
        op=origin.op,
        node=origin.node,
        forward_op=origin.forward_op,
        file="" if line is None else line.file,
        line=0 if line is None else line.number,
        function="" if line is None else line.function,
        code="" if line is None else line.code,
        operands=origin.operands,
        results=origin.results,
        facts=tuple(sorted(origin.facts)),
        victim=victim,
        cause="" if cause is None else cause.key,
    )
