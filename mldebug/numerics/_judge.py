"""From an alarm to an event: which call, which module, what kind; by a replay where one is possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.core.world import world
from mldebug.numerics._event import Event, Kind, Phase, Role
from mldebug.numerics._frames import PREFIX, Finding, Frames
from mldebug.numerics._records import Call, Site, Watched
from mldebug.numerics._replay import NotReplayable
from mldebug.numerics._stats import LIMIT, Stats, finite_absmax
from mldebug.numerics._weights import full_name, join_name

if TYPE_CHECKING:
    from mldebug.numerics._gradients import GradientNorms
    from mldebug.numerics._recorder import DebugUnderflowOverflow


class Found:
    """What the judge hands over: the event, its frames and where they come from."""

    def __init__(self, event: Event, frames: list[str], source: str, reason: str = "") -> None:
        self.event, self.frames, self.source, self.reason = event, frames, source, reason


class _Stop(BaseException):
    """Ends a replay at its finding. Not an Exception: a model that catches those must not catch this."""


class Judge:
    """Explains alarms of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder

    def explain(self, alarm: int, calls: Sequence[Call]) -> Found | None:
        """The event behind the alarm of record number `alarm`, which one of `calls` made.

        None for a bad input from which nothing bad followed: the model masked it away.
        """
        memory = self._recorder.memory
        call = next((c for c in calls if c.start <= alarm < c.end), calls[-1])
        if memory.site(alarm).role == "input":
            origin = self._input_that_spread(calls)
            if origin is None:
                return None
            alarm, call = origin
        else:
            alarm = self._earliest(alarm, call)
        site, stats = memory.site(alarm), memory.stats([alarm])[0]
        event = self._event(site, stats, call)
        frames, reason = self._replay(call)
        if frames is None:
            return Found(self._blame_buffer(event), self.ring_frames(call, alarm), "ring", reason)
        if event.role not in ("parameter", "buffer") and frames.finding is not None:
            event = self._refine(event, frames.finding, call)
            event = self._blame_log(event, frames, call)
        return Found(self._blame_buffer(event), list(frames.texts), "replay")

    def from_live(self, frames: Frames, call: Call) -> Found:
        """The event that live frames have just met (`check="each"`)."""
        finding = frames.finding
        assert finding is not None
        event = self._from_finding(finding, call, "forward")
        return Found(self._blame_buffer(event), list(frames.texts), "live")

    def from_gradients(self, norms: GradientNorms) -> Found | None:
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
        event = Event(
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
        return Found(event, [], "")

    def stop_replay(self) -> None:
        raise _Stop

    def _input_that_spread(self, calls: Sequence[Call]) -> tuple[int, Call] | None:
        """The first bad input whose call also has a bad output; else the first bad output."""
        memory = self._recorder.memory
        for call in calls:
            numbers = [n for n in range(call.start, call.end) if memory.holds(n)]
            bad = memory.bad(numbers)
            if any(memory.site(n).role != "input" for n in bad):
                inputs = [n for n in bad if memory.site(n).role == "input"]
                return (inputs or bad)[0], call
            if bad:
                site = memory.site(bad[0])
                self._recorder.note(f"{site.path} of the model holds nan or inf; nothing bad followed from it")
        return None

    def _earliest(self, alarm: int, call: Call) -> int:
        """A compiled root records its inputs after its outputs: a bad input comes first all the same."""
        memory = self._recorder.memory
        site = memory.site(alarm)
        if site.role in ("input", "parameter", "buffer"):
            return alarm
        later = [
            n for n in range(max(alarm, call.start), call.end) if memory.holds(n) and memory.site(n).role == "input"
        ]
        return next(iter(memory.bad(later)), alarm)

    def _event(self, site: Site, stats: Stats, call: Call) -> Event:
        step, phase = call.step, "forward"
        param = full_name(site) if site.role in ("parameter", "buffer") else None
        if site.role in ("parameter", "buffer"):
            if self._recorder.weights.passes <= 1:
                phase = "init"
            else:
                step = max(call.step - 1, 0)
                phase = "forward" if site.role == "buffer" else self._phase_of_update(step)
        return self._make(
            site.owner, site.role, site.path, stats, call, phase, step=step, param=param, dtype=site.dtype
        )

    def _phase_of_update(self, step: int) -> Phase:
        norms = self._recorder.gradients.of(step)
        return "optimizer" if norms is None or math.isfinite(norms.total) else "backward"

    def _refine(self, event: Event, finding: Finding, call: Call) -> Event:
        if event.role == "input":
            return event
        return self._from_finding(finding, call, "forward")

    def _from_finding(self, finding: Finding, call: Call, phase: Phase) -> Event:
        return self._make(
            finding.owner,
            finding.role,
            finding.name,
            finding.stats,
            call,
            phase,
            param=finding.param,
            dtype=finding.tensor.dtype,
            tensor=finding.tensor,
        )

    def _make(
        self,
        owner: Watched | None,
        role: Role,
        name: str,
        stats: Stats,
        call: Call,
        phase: Any,
        *,
        dtype: torch.dtype,
        step: int | None = None,
        param: str | None = None,
        tensor: torch.Tensor | None = None,
    ) -> Event:
        kind: Kind = "nan" if stats.has_nan else "inf"
        bad = stats.nan + stats.posinf + stats.neginf if stats.nan >= 0 else None
        return Event(
            step=call.step if step is None else step,
            batch=call.batch,
            micro_batch=call.micro_batch,
            phase=phase,
            module=None if owner is None else owner.name,
            module_class="" if owner is None else owner.cls,
            role=role,
            kind=kind,
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            limit=LIMIT.get(dtype, math.inf),
            param=param,
            rank=world().rank,
            absmax=None if tensor is None else finite_absmax(tensor),
            bad=bad,
            numel=None if tensor is None else tensor.numel(),
            training=call.training,
        )

    def _blame_buffer(self, event: Event) -> Event:
        """A buffer that was bad from the start is the origin of what its own module then returned."""
        if event.module is None or event.role not in ("output", "loss"):
            return event
        for name, kind in self._recorder.weights.bad_buffers.items():
            owner, _, short = name.rpartition(".")
            if owner == event.module or owner.startswith(event.module + ".") or not event.module:
                return replace(
                    event,
                    phase="init",
                    role="buffer",
                    name=short,
                    param=name,
                    kind="nan" if kind == "nan" else "inf",
                    module=owner,
                    step=0,
                    module_class=self._class_of(owner) or event.module_class,
                    absmax=None,
                    bad=None,
                )
        return event

    def _class_of(self, name: str) -> str:
        return next((w.cls for w in self._recorder.weights.watched() if w.name == name), "")

    def _blame_log(self, event: Event, frames: Frames, call: Call) -> Event:
        """An output whose only extreme is -inf, when NaN or +inf follows from it: a log of zero, not a mask.

        A second replay looks at the operations: -inf that was written on purpose (masked_fill, where, full) or handed
        on from an operand is a mask; -inf that an operation made from finite operands is where it began.
        """
        if not frames.masks or call.snapshot is None:
            return event
        from mldebug.numerics._masks import MinusInfinity

        again = self._recorder.forwards.new_frames()
        with MinusInfinity(again) as watch:
            self._run(call, again)
        if watch.origin is None:
            return event
        mask = next((m for m in frames.masks if m.owner is watch.origin), None)
        return event if mask is None else self._from_finding(mask, call, "forward")

    def _replay(self, call: Call) -> tuple[Frames | None, str]:
        if call.snapshot is None:
            return None, call.replay_reason or "its inputs were not kept"
        frames = self._recorder.forwards.new_frames()
        frames.begin_batch(call.batch)
        reason = self._run(call, frames)
        if reason:
            return None, reason
        if frames.finding is None:
            return None, "a replay of this forward did not show it again"
        return frames, ""

    def _run(self, call: Call, frames: Frames) -> str:
        """Replay a call into frames; "" or why it could not be done."""
        forwards, snapshot = self._recorder.forwards, call.snapshot
        assert snapshot is not None
        saved = forwards.call, forwards.live
        forwards.replaying = True
        forwards.call, forwards.live = replace(call, snapshot=None, paused=False), frames
        try:
            snapshot.run()
        except _Stop:
            pass
        except NotReplayable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            forwards.replaying = False
            forwards.call, forwards.live = saved
            self._recorder.memory.forget_last()
        return ""

    def ring_frames(self, call: Call, alarm: int) -> list[str]:
        """Frames of outputs only, from what the ring still holds."""
        memory = self._recorder.memory
        numbers = [n for n in range(call.start, alarm + 1) if memory.holds(n)]
        groups: list[tuple[Watched | None, list[str]]] = []
        for number, stats in zip(numbers, memory.stats(numbers), strict=True):
            site = memory.site(number)
            if site.role in ("parameter", "buffer") and number != alarm:
                continue
            if not groups or groups[-1][0] is not site.owner or site.path in ("output", "output[0]"):
                groups.append((site.owner, []))
            groups[-1][1].append(stats.line(site.path))
        heads = [f"{PREFIX} {o.name} {o.cls}" if o is not None else f"{PREFIX} outside any module" for o, _ in groups]
        texts = ["\n".join([head, *lines]) for head, (_, lines) in zip(heads, groups, strict=True)]
        return texts[-self._recorder.max_frames_to_save :]
