"""From an alarm to an event: what came first, what only looks bad, and what followed from what; by replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mldebug.numerics import _hub
from mldebug.numerics._event import Event
from mldebug.numerics._events import Events
from mldebug.numerics._frames import PREFIX, Frames
from mldebug.numerics._masks import MinusInfinity
from mldebug.numerics._records import Call, Watched
from mldebug.numerics._replay import NotReplayable
from mldebug.numerics._weights import full_name

if TYPE_CHECKING:
    from mldebug.numerics._gradients import GradientNorms
    from mldebug.numerics._recorder import DebugUnderflowOverflow


@dataclass
class Found:
    """An event with its frames and where they come from ("replay", "ring", "live", or "" for none)."""

    event: Event
    frames: list[str]
    source: str
    reason: str = ""
    bad_weights: Sequence[str] = ()  # with the event of a parameter or buffer: all that are bad now


class _Stop(BaseException):
    """Ends a replay at its finding. Not an Exception: a model that catches those must not catch this."""


class Judge:
    """Explains the alarms of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._events = Events(recorder)

    def explain(self, calls: Sequence[Call]) -> Found | None:
        """The event behind an alarm in these calls; None if what alarmed turns out to be harmless."""
        primary = self._primary(calls)
        return None if primary is None else self._explain(*primary)

    def from_live(self, frames: Frames, call: Call) -> Found:
        """The event that live frames have just met (`check="each"`)."""
        assert frames.finding is not None
        return Found(self._events.from_finding(frames.finding, call), list(frames.texts), "live")

    def from_gradients(self, norms: GradientNorms) -> Found | None:
        event = self._events.from_gradients(norms)
        return None if event is None else Found(event, [], "")

    def without_replay(self, calls: Sequence[Call]) -> tuple[Found, list[Callable[[], None]]] | None:
        """What can be said at once, when a replay was interrupted."""
        primary = self._primary(calls)
        if primary is None:
            return None
        number, call = primary
        memory = self._recorder.memory
        event = self._events.from_record(memory.site(number), memory.stats([number])[0], call)
        return Found(event, self.ring_frames(call, number), "ring", "the replay was interrupted"), []

    def stop_replay(self) -> None:
        raise _Stop

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
                if site.role == "buffer" and full_name(site) in call.new_names:
                    weights.remember_buffer(site, memory.stats([number])[0], call.step)
                elif site.role != "input":
                    return number, call
            for number in bad:
                site = memory.site(number)
                if site.role == "input":
                    self._recorder.note(f"{site.path} of the model holds nan or inf; nothing bad followed from it")
        return None

    def _explain(self, number: int, call: Call) -> Found:
        """The event behind one bad record."""
        memory = self._recorder.memory
        early = memory.early
        site, stats = early[1:] if early is not None else (memory.site(number), memory.stats([number])[0])
        event = self._events.from_record(site, stats, call)
        frames, reason = self._replay(call)
        if site.role in ("parameter", "buffer"):
            weights = [n for n in range(call.start, call.first) if memory.holds(n)]
            names = [full_name(memory.site(n)) for n in memory.bad(weights)]
            if event.phase == "backward":
                event = self._events.nearest_to_the_loss(event)
            if frames is None or frames.finding is None:
                reason = reason or "it was found before the forward"
                return Found(event, self.ring_frames(call, number), "ring", reason, names)
            return Found(event, list(frames.texts), "replay", "", names)
        if frames is None or frames.finding is None or frames.finding.role == "parameter":
            if frames is not None:
                showed = frames.finding is not None
                reason = "the weights have changed since" if showed else "a replay of this forward did not show it"
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
            origin = self._computed_infinity(call)
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
        clean, _ = self._replay(call, inputs=bool(inputs), buffers=tensors)
        if clean is None:
            return None
        if clean.finding is not None:
            return Found(self._events.from_finding(clean.finding, call), list(clean.texts), "replay")
        if inputs and buffers:
            only, _ = self._replay(call, inputs=True)
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

    def _computed_infinity(self, call: Call) -> Watched | None:
        """The module that first computed a -inf, by a replay under a look at every operation."""
        again = self._recorder.forwards.new_frames(live=False)
        watch = MinusInfinity(again)
        with watch:
            self._run(call, again)
        return watch.origin

    def _replay(
        self, call: Call, *, inputs: bool = False, buffers: Sequence[torch.Tensor] = ()
    ) -> tuple[Frames | None, str]:
        """Frames of a replay (with finite values for bad inputs and buffers), or why there is none."""
        if call.snapshot is None:
            return None, call.replay_reason or "its inputs were not kept"
        frames = self._recorder.forwards.new_frames(live=False)
        frames.begin_batch(call.batch)
        reason = self._run(call, frames, inputs, buffers)
        return (None, reason) if reason else (frames, "")

    def _run(self, call: Call, frames: Frames, inputs: bool = False, buffers: Sequence[torch.Tensor] = ()) -> str:
        """Replay a call into frames; "" or why it could not be done."""
        forwards, snapshot = self._recorder.forwards, call.snapshot
        assert snapshot is not None
        saved = forwards.call, forwards.live
        _hub.replaying = (self._recorder, threading.get_ident())
        forwards.replaying = True
        forwards.call, forwards.live = replace(call, snapshot=None, paused=False), frames
        try:
            snapshot.run(finite_inputs=inputs, finite_buffers=buffers)
        except _Stop:
            pass
        except NotReplayable as reason:
            return str(reason)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        finally:
            _hub.replaying = None
            forwards.replaying = False
            forwards.call, forwards.live = saved
            self._recorder.memory.forget_last()
        return ""
