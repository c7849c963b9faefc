"""From an alarm to an event: what came first, what only looks bad, and what followed from what; by replay."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.numerics._event import Again, Event, Operation
from mldebug.numerics._events import Events
from mldebug.numerics._frames import PREFIX, Finding, Frames
from mldebug.numerics._weights import full_name
from mldebug.numerics.gradients._scaler import Scaling
from mldebug.numerics.gradients._updates import Updates
from mldebug.numerics.replay._found import Found
from mldebug.numerics.replay._refine import refined, up_to
from mldebug.numerics.replay._reruns import Reruns
from mldebug.numerics.replay._returned import comes_back_bad, computed_infinity, reaches_loss, returned_infinity
from mldebug.numerics.ring._records import IN_GRAPH, Call, Watched, is_compiled

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.gradients._gradients import GradientNorms
    from mldebug.numerics.ops._ops import OpWatch
    from mldebug.numerics.ops._origins import Origin
    from mldebug.numerics.replay._backward import Backwards, Kept


NOT_SHOWN = "a replay of this forward did not show it"


class Judge:
    """Explains the alarms of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._events = Events(recorder)
        self.scaling = Scaling(self)
        self.updates = Updates(recorder.weights)
        self.reruns = Reruns(recorder)
        self._unshown: tuple[int, Again, str] = (-1, "", "")  # a step with bad gradients: what its replay came to

    def explain(self, calls: Sequence[Call]) -> Found | None:
        """The event behind an alarm in these calls; None if what alarmed turns out to be harmless."""
        primary = self._primary(calls)
        if primary is None:
            return None
        number, call = primary
        if self._recorder.memory.site(number).owner is None and self._recorder.memory.early is None:
            return self._made_outside(number, call)
        return self._with_operation(self._explain(number, call), number, call)

    def of_mask(self, mask: Finding, frames: Frames, call: Call) -> Found:
        """The event of a -inf that turned out to be no mask."""
        return Found(self._events.from_finding(mask, call), list(frames.texts), "replay")

    def from_live(self, frames: Frames, call: Call) -> Found:
        """The event that live frames have just met (`check="each"`)."""
        assert frames.finding is not None
        return Found(self._events.from_finding(frames.finding, call), list(frames.texts), "live")

    def from_gradients(self, norms: GradientNorms) -> Found | None:
        event = self._events.from_gradients(norms)
        return None if event is None else Found(event, [], "")

    def from_origin(self, origin: Origin) -> Found:
        """The event of an operation, with the frames that the recorder still has of its forward."""
        event = self._events.from_origin(origin)
        calls = self._recorder.memory.calls
        call = next((c for c in calls if c.batch == origin.batch and c.step == origin.step), None)
        if call is None or origin.phase != "forward":
            return Found(event, [], "", call=origin.again or origin.not_kept)
        return Found(
            event, up_to(event, self.ring_frames(call, call.end - 1)), "ring", call=origin.again or origin.not_kept
        )

    def refine(self, found: Found, ops: OpWatch) -> Found:
        """An event of the recorder with the operation behind it."""
        return refined(found, ops, self._events, self._recorder.weights)

    def before_step(self, step: int, scaler: Any, backwards: Backwards) -> Found | None:
        """The event of gradients that are not finite, before the optimizer steps: forward and backward run again.

        What does not come again is remembered and not an event yet: code between backward and here may have changed
        the gradients, or may be about to leave this step out. It is one if a parameter is bad in the next forward.
        """
        norms = self._recorder.gradients.of(step)
        if norms is not None and norms.scaled:
            return self.scaling.judge(norms, backwards.ran(), backwards.after_model.origin)
        if norms is None or (scaler is not None and scaler.is_enabled()):
            return None
        if math.isfinite(norms.total) or norms.bad() is None:
            return None
        event = self._events.from_gradients(norms)
        if event is None:
            return None
        found, reasons = Found(event, [], ""), []
        ran = backwards.ran()
        for kept in ran:
            if any(not bool(torch.isfinite(grad).all()) for grad in kept.grads.values()):
                call = replace(kept.call, snapshot=None if kept.reason else kept.snapshot)
                infinite = returned_infinity(self, call, functools.partial(comes_back_bad, grads=kept.grads))
                if infinite is not None:
                    return infinite
                if made := self._after_model(backwards) or self._hooked(event, kept):
                    return made
                outside = replace(event, module=None, module_class="", name="gradient", param=None)
                return replace(found, event=outside, reason="it came from code outside of the model")
            watch, reason = (None, kept.reason) if kept.reason else self.reruns.operations(kept.call, kept)
            if reason:
                reasons.append(reason)
            elif watch is not None and (origin := watch.verdict()) is not None:
                event = replace(self._events.from_origin(origin), again="shown")
                return replace(found, event=event, call=origin.again or origin.not_kept)
        if made := self._after_model(backwards):
            return made
        again: Again = "only when compiled" if any(is_compiled(kept.call) for kept in ran) else "did not reproduce"
        if not reasons and any(kept.twice for kept in ran):
            reasons = ["its gradients were differentiated again (create_graph=True), which is not run again"]
        reason = reasons[0] if reasons else "" if ran else "no gradient of what the model returned was seen"
        self._unshown = step, "not replayable" if reason else again, reason
        return None

    def _after_model(self, backwards: Backwards) -> Found | None:
        """The event of a bad gradient that the code after the model made, if its operation was seen."""
        origin = backwards.after_model.origin
        if origin is None:
            return None
        event = replace(self._events.from_origin(origin), again="shown")
        return Found(event, [], "", call=origin.again or origin.not_kept)

    def _hooked(self, event: Event, kept: Kept) -> Found | None:
        """The event of a bad gradient that a hook on what the root returned made of a good one."""
        line, root = kept.changed_by_hook(), kept.call.watched
        if line is None:
            return None
        operation = Operation("a hook", "", "", *line, line.code, facts=("a hook",), cause="hook on an output")
        made = replace(
            event, module=root.name, module_class=root.cls, name="gradient", param=None, op="a hook",
            operation=operation, again="shown",
        )  # fmt: skip
        return Found(made, [], "", call="a hook is no operation")

    def dropped(self, step: int, backwards: Backwards) -> Found | None:
        """The event of gradients that are not finite and will not be applied, whatever a replay comes to.

        None where another rank knows more: it tells of what made the gradients, which were averaged.
        """
        norms = self._recorder.gradients.of(step)
        if norms is None or norms.bad() is None:
            return None
        found = self.before_step(step, None, backwards) if self._recorder.memory.on_host else None
        event = self._events.from_gradients(norms)
        if found is not None or event is None or self._recorder.ranks.together is not None:
            return found
        if not self._recorder.memory.on_host:
            return Found(self._events.of_bad_gradients(event), [], "")
        _, again, reason = self._unshown
        return Found(replace(event, again=again), [], "", reason)

    def with_all(self, kept: Kept, found: Found | None) -> Found | None:
        """Run a sharded forward again while all ranks do; the event with what came of that."""
        self.reruns.with_all = True
        try:
            watch, reason = self.reruns.operations(replace(kept.call, snapshot=kept.snapshot))
        finally:
            self.reruns.with_all = False
        if found is None:
            return None
        if watch is None:
            return replace(found, reason=reason)
        origin = watch.verdict()
        if origin is None and watch.victim is None:
            unshown = replace(found.event, again="did not reproduce")
            return replace(found, event=unshown, reason=NOT_SHOWN, announced=False)
        refined = self.refine(found, watch)
        return replace(refined, event=replace(refined.event, again="shown"), reason="", announced=False)

    def has_unshown(self, step: int) -> bool:
        """Whether gradients of this step are bad for no reason that was seen here."""
        return self._unshown[0] == step

    def at_scale_one(self, kept: Kept, scale: float) -> Found | None:
        """The event of a backward that is bad without the loss scale too; None if it is fine or cannot be run again."""
        if kept.reason or not all(bool(torch.isfinite(grad).all()) for grad in kept.grads.values()):
            return None  # it came in bad: the loss or its scale, which only time can tell
        watch, _ = self.reruns.operations(kept.call, kept, scale)
        origin = None if watch is None else watch.verdict()
        if origin is None:
            return None
        return Found(
            replace(self._events.from_origin(origin), again="shown"), [], "", call=origin.again or origin.not_kept
        )

    def _with_operation(self, found: Found, number: int, call: Call) -> Found:
        """The event of a forward with the operation behind it, by one more replay; or what came of the replay."""
        event, site = found.event, self._recorder.memory.site(number)
        before = event.role == "buffer" and number < call.first  # of the forward
        if event.phase != "forward" or before or self._recorder.ops is not None or site.owner is None:
            return found
        if found.source == "replay":
            watch, _ = self.reruns.operations(call, buffer=event.param if event.role == "buffer" else None)
            found = found if watch is None else self.refine(found, watch)
            return replace(found, event=replace(found.event, again="shown"))
        compiled = site.extremes or is_compiled(call)
        again: Again = "only when compiled" if compiled else "did not reproduce"
        if found.reason != NOT_SHOWN:
            again = "not replayable"
        return replace(found, event=replace(event, again=again))

    def without_replay(self, calls: Sequence[Call]) -> tuple[Found, list[Callable[[], None]]] | None:
        """What can be said at once, when a replay was interrupted."""
        primary = self._primary(calls)
        if primary is None:
            return None
        number, call = primary
        memory = self._recorder.memory
        event = self._events.from_record(memory.site(number), memory.stats([number])[0], call)
        return Found(event, self.ring_frames(call, number), "ring", "the replay was interrupted"), []

    def ring_frames(self, call: Call, last: int) -> list[str]:
        """Frames of outputs only, up to record `last`, from what the ring still holds."""
        memory = self._recorder.memory
        numbers = [n for n in range(call.start, last + 1) if memory.holds(n)]
        groups: list[tuple[Watched | None, list[str]]] = []
        for number, stats in zip(numbers, memory.stats(numbers), strict=True):
            site = memory.site(number)
            if site.role in ("parameter", "buffer") and number != last:
                continue
            if not groups or groups[-1][0] is not site.owner or site.path in ("output", "output[0]"):
                groups.append((site.owner, []))
            groups[-1][1].append(stats.line(site.path))
        heads = [f"{PREFIX} {o.name} {o.cls}" if o is not None else f"{PREFIX} outside any module" for o, _ in groups]
        texts = ["\n".join([head, *lines]) for head, (_, lines) in zip(heads, groups, strict=True)]
        return texts[-self._recorder.max_frames_to_save :]

    def _primary(self, calls: Sequence[Call]) -> tuple[int, Call] | None:
        """The first bad record that counts by itself, and its call.

        An input, or a buffer that was never good, only counts if something bad follows from it: models are given NaN
        for "missing", and keep inf for "none yet". These are noted.
        """
        memory, weights = self._recorder.memory, self._recorder.weights
        if memory.early is not None:
            number = memory.early[0]
            return number, next((c for c in calls if c.start <= number < c.end), calls[-1])
        for call in calls:
            bad = memory.bad([n for n in range(call.start, call.end) if memory.holds(n)])
            for number in bad:
                site = memory.site(number)
                if site.role == "buffer" and number >= call.first:  # good at its entry, or known to be bad
                    if full_name(site) not in weights.bad_buffers:
                        return number, replace(call, new_names=frozenset(), same_step=True)
                elif site.role == "buffer" and full_name(site) in call.new_names:
                    weights.remember_buffer(site, memory.stats([number])[0], call.step)
                elif site.role != "input":
                    return number, call
            for number in bad:
                site = memory.site(number)
                if site.role == "input":
                    self._recorder.note(f"{site.path} of the model holds nan or inf; nothing bad followed from it")
        return None

    def _made_outside(self, number: int, call: Call) -> Found:
        """The event of a value made outside any module, the loss say; or of a -inf that the model returned for it."""
        memory, recorder = self._recorder.memory, self._recorder
        event = self._events.from_record(memory.site(number), memory.stats([number])[0], call)
        kept = recorder.forwards.backwards.of_batch(call.batch)
        if kept is not None and not kept.reason:
            call = replace(kept.call, snapshot=kept.snapshot)
        harms = functools.partial(reaches_loss, grads=None if kept is None or not kept.grads else kept.grads)
        if event.role == "loss" and recorder.ops is None and (found := returned_infinity(self, call, harms)):
            return found
        made = recorder.values.operation_of(event.batch) if event.role == "loss" else None
        if made is not None:
            event = self._events.of_loss(event, made)
        of_it = next((known for known in memory.calls if known.start <= number < known.end), call)
        return Found(event, self.ring_frames(of_it, number), "ring", call=None if made is None else made.again)

    def _explain(self, number: int, call: Call) -> Found:
        """The event behind one bad record."""
        memory = self._recorder.memory
        early = memory.early
        site, stats = early[1:] if early is not None else (memory.site(number), memory.stats([number])[0])
        event = self._events.from_record(site, stats, call)
        # Modules inside a CUDA graph do not run when it is replayed: a forward that runs again shows less than it did.
        frames, reason = (None, IN_GRAPH) if memory.in_graph(number) else self.reruns.frames(call)
        if site.role in ("parameter", "buffer"):
            in_forward = early is None and number >= call.first
            weights = [n for n in range(*((call.first, call.end) if in_forward else (call.start, call.first)))]
            weights = [n for n in weights if memory.holds(n) and memory.site(n).role in ("parameter", "buffer")]
            names = [full_name(memory.site(n)) for n in memory.bad(weights)]
            norms = self._recorder.gradients.of(event.step) if event.phase == "optimizer" else None
            if norms is not None:
                event = replace(event, cause=self.updates.cause(event, norms))
            if event.phase == "backward":
                event = self._events.of_bad_gradients(event)
                unshown, again, why = self._unshown
                if unshown == event.step:
                    event, reason = replace(event, again=again), why
            if frames is None or (frames.finding is None and not in_forward):
                reason = reason or "it was found before the forward"
                return Found(event, self.ring_frames(call, number), "ring", reason, bad_weights=names)
            return Found(event, list(frames.texts), "replay", reason if event.again else "", bad_weights=names)
        if frames is None or frames.finding is None or frames.finding.role == "parameter":
            if frames is not None:
                showed = frames.finding is not None
                reason = "the weights have changed since" if showed else NOT_SHOWN
            first = next((n for n in self._bad_inputs(call)), number)
            if early is not None:
                return Found(event, self.ring_frames(call, number), "ring", reason)
            event = self._events.from_record(memory.site(first), memory.stats([first])[0], call)
            return Found(event, self.ring_frames(call, number), "ring", reason)
        blamed = self._blame(call, frames)
        if blamed is not None:
            return blamed
        event = self._events.from_finding(frames.finding, call)
        if frames.masks:
            origin = computed_infinity(self, call)
            mask = next((m for m in frames.masks if m.owner is origin), None)
            if mask is not None:
                event = self._events.from_finding(mask, call)
        return Found(event, list(frames.texts), "replay")

    def _blame(self, call: Call, frames: Frames) -> Found | None:
        """An input or a buffer that was bad before is the origin if the finding goes away without it.

        Found out by running the forward again with finite values in its place. If another finding remains, that one
        is the event.
        """
        snapshot = call.snapshot
        assert snapshot is not None
        inputs = snapshot.bad_inputs()
        buffers = self._recorder.weights.bad_buffers
        if not inputs and not buffers:
            return None
        tensors = [t for name in buffers if (t := self._recorder.weights.find(name)) is not None]
        clean, _ = self.reruns.frames(call, inputs=bool(inputs), buffers=tensors)
        if clean is None:
            return None
        if clean.finding is not None:
            return Found(self._events.from_finding(clean.finding, call), list(clean.texts), "replay")
        if inputs and buffers:
            only, _ = self.reruns.frames(call, inputs=True)
            inputs = inputs if only is not None and only.finding is None else []
        if inputs:
            memory = self._recorder.memory
            for number in range(call.first, call.end):
                site = memory.site(number)
                if memory.holds(number) and site.role == "input" and site.path in inputs:
                    event = self._events.from_record(site, memory.stats([number])[0], call)
                    return Found(event, list(frames.texts), "replay")
        for name, bad in buffers.items():
            return Found(self._events.from_buffer(name, bad, call), list(frames.texts), "replay")
        return None

    def _bad_inputs(self, call: Call) -> list[int]:
        memory = self._recorder.memory
        numbers = [n for n in range(call.start, call.end) if memory.holds(n) and memory.site(n).role == "input"]
        return memory.bad(numbers)
