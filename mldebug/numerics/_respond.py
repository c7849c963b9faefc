"""What is done about an event: report, raise, warn, skip; the notes, the history and the output file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.core.world import world
from mldebug.numerics._event import Event
from mldebug.numerics._history import History, place_of
from mldebug.numerics._output import LinesFile
from mldebug.numerics._reading import clean, doubt, read
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._stats import LIMIT
from mldebug.numerics._tell import say, warn
from mldebug.numerics._weights import join_name

if TYPE_CHECKING:
    from mldebug.numerics._judge import Found
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics._records import Watched

_NEAR_NOTES = 8  # tensors near the limit of their dtype that a report names
_DROPPED_STEPS = 10  # that a report names
_FULL_REPORTS = 3  # events of one run that are printed whole; then only at 10, 100, ...


class Responder:
    """Handles the events of one recorder and keeps what its report needs."""

    def __init__(
        self,
        recorder: DebugUnderflowOverflow,
        on_event: str | Callable[[Event], None],
        on_step: Callable[[int, dict[str, float]], None] | None,
        output: Any,
    ) -> None:
        self._recorder = recorder
        self._on_event = on_event
        self._on_step = on_step
        self._lines = LinesFile(output) if output is not None else None
        self._history = History(recorder)
        self._first: NumericsReport | None = None
        self._benign: NumericsReport | None = None  # an overflow of the loss scale: reported if nothing worse comes
        self._events = 0
        self._near: dict[str, str] = {}  # place -> note
        self._frames: list[str] = []  # of the last live batch, or of a forward that did not return
        self._frames_from = self._why_ring = ""
        self._drop = ""  # "yes" from a bad forward until the next one begins
        self._dropped: set[int] = set()  # steps whose gradients were taken away
        self.busy = False  # the user's own on_event is running
        self.user_error: BaseException | None = None  # what it raised: not our failure
        self.notes: dict[str, None] = {}  # said once, in order
        self._quiet = False
        self.printing = self.warning = True  # diagnose() turns both off, the command the first

    # Events.

    def handle(self, found: Found, restore: Sequence[Callable[[], None]] = ()) -> Event:
        """Do what `on_event` says; "raise" is a NumericsError. `restore` gives buffers their values from before."""
        event = found.event
        report = self._build(found)
        if event.benign:
            self._benign = self._benign or report
            return event
        self._events += 1
        if self._first is None:
            self._first = report
        for name in found.bad_weights:
            self._recorder.weights.set_aside(name)
        told = self._events <= _FULL_REPORTS or str(self._events).strip("0") == "1"
        if told and self._lines is not None:
            self._lines.write_event(report)
        if told and self.printing:
            say(f"\n{report.text()}\n")
        if self._quiet:
            return event
        if callable(self._on_event):
            self.busy = True
            try:
                self._on_event(event)
            except BaseException as error:
                self.user_error = error
                raise
            finally:
                self.busy = False
        elif self._on_event == "raise":
            raise NumericsError(f"{type(self._recorder).__name__}: {report.verdict}", report.hint, report)
        else:
            if self._on_event == "skip":
                self._drop = "yes"
                for give_back in restore:
                    give_back()
            if told:
                warn(f"mldebug: {report.verdict}\nhint: {report.hint}")
        return event

    @contextlib.contextmanager
    def never_raise(self, exc: BaseException | None) -> Iterator[None]:
        """For the end of a run that is ending anyway: report, and let the exception under way go on its way."""
        self._quiet = True
        before = self._events
        try:
            yield
        finally:
            self._quiet = False
            if exc is not None and self._events > before and self._first is not None and hasattr(exc, "add_note"):
                exc.add_note(f"mldebug: before this, {self._first.verdict}")

    def drop_if_bad(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """on_event="skip": take the gradients of a bad batch away, so that the optimizer has nothing to apply.

        A batch is bad if its forward was, or if its gradients are not finite; looking at those waits for backward.
        """
        if self._on_event != "skip":
            return
        grads = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # With several ranks only what they all see may decide: the gradients, which they have averaged.
        sure = self._drop == "yes" and world().world_size == 1
        if not grads or not (sure or not all(bool(torch.isfinite(p.grad).all()) for p in grads)):
            return
        if scaler is not None and scaler.is_enabled():
            if not sure:
                return  # inf from the loss scale: the scaler sees it by itself
            # A scaler insists on having looked at gradients before they go.
            state = scaler._per_optimizer_states[id(optimizer)]
            if state["stage"].name == "READY":
                scaler.unscale_(optimizer)
        for param in grads:
            param.grad = None
        self._dropped.add(self._recorder.step)

    def batch_begins(self) -> None:
        """Another training forward: the script may have skipped the bad batch by itself."""
        self._drop = ""

    def abort(self, batches: int, last: int) -> None:
        """Stop after a batch, as `abort_after_batch_num` asks."""
        raise NumericsError(
            f"{type(self._recorder).__name__}: aborting after {batches} batches due to"
            f" `abort_after_batch_num={last}` arg",
            report=self.report(),
        )

    # Notes and history.

    def note_near(self, number: int) -> None:
        """A value close to its dtype's limit: said once a place."""
        memory = self._recorder.memory
        if not memory.holds(number):
            return
        site, stats = memory.site(number), memory.stats([number])[0]
        place = place_of(site)
        if place in self._near:
            return
        limit = LIMIT[site.dtype]
        note = (
            f"overflow ahead: {place} reached {stats.absmax:.3g} at step {self._recorder.step}, "
            f"{100 * stats.absmax / limit:.0f}% of what {str(site.dtype).removeprefix('torch.')} can hold ({limit:.4g})"
        )
        self._near[place] = note
        if self.warning and len(self._near) <= 5:
            warn(f"mldebug: {note}\nhint: {_NEAR_HINT}")

    def note_underflow(self, owner: Watched, name: str) -> None:
        """A gradient that has underflowed to zero: said once a parameter."""
        note = f"underflow: the gradient of {join_name(owner.name, name)} is all zero in float16, below tiny ones"
        if note not in self.notes:
            self.notes[note] = None
            if self.warning:
                hint = "scale the loss (torch.amp.GradScaler) or train in bfloat16"
                warn(f"mldebug: {note}\nhint: {hint}")

    def step_done(self, step: int) -> None:
        """An optimizer step is over: hand its numbers to `on_step` and to the output file, one step late."""
        if self._on_step is None and self._lines is None:
            return
        for row in self._history.finished(step):
            self._tell(row)

    def keep_frames(self, frames: list[str]) -> None:
        """The frames of a live batch, for a report without event."""
        self._frames, self._frames_from, self._why_ring = frames, "live", ""

    def _keep_unfinished(self) -> None:
        """The frames of a forward that did not return: its last lines are the only witness."""
        calls = self._recorder.memory.calls
        if self._frames_from != "live" and calls and not calls[-1].finished and calls[-1].end > calls[-1].first:
            self._frames = self._recorder.ring_frames(calls[-1])
            self._frames_from, self._why_ring = "ring", "the forward did not return"

    def report(self) -> NumericsReport:
        """The report of the run up to now."""
        found = self._first or self._benign
        if found is None:
            return self._build(None)
        recorder = self._recorder
        return replace(
            found, events=self._events, steps=recorder.step, batches=recorder.batch_number, **self._dropped_steps()
        )

    def _dropped_steps(self) -> dict[str, Any]:
        return {"dropped": len(self._dropped), "dropped_steps": sorted(self._dropped)[:_DROPPED_STEPS]}

    def finish(self) -> None:
        """The last steps' numbers."""
        if self._on_step is not None or self._lines is not None:
            for row in self._history.rest():
                try:
                    self._tell(row)
                except Exception as error:  # on_step, at the end of a run that may be ending for another reason
                    warn(f"mldebug: on_step failed on step {row['step']}: {type(error).__name__}: {error}")

    def begin(self) -> None:
        """The recorder is attached, for the first time or again: what it found before is another run's."""
        self._first = self._benign = None
        self._events = 0
        if self._lines is not None:
            self._lines.open()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _tell(self, row: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write("step", row)
        if self._on_step is not None:
            try:
                self._on_step(row["step"], {key: row[key] for key in ("loss", "grad_norm", "absmax") if key in row})
            except BaseException as error:
                self.user_error = error
                raise

    def _build(self, found: Found | None) -> NumericsReport:
        recorder = self._recorder
        rows = self._history.rows(None if found is None else found.event)
        before = None if found is None else found.event.batch
        notes = [*list(self._near.values())[:_NEAR_NOTES], *self._history.notes(before), *self.notes]
        if len(self._near) > _NEAR_NOTES:
            notes.append(f"overflow ahead: {len(self._near) - _NEAR_NOTES} more tensors came near the limit")
        if recorder.forwards.recomputed:
            notes.append(
                f"activation checkpointing ran {recorder.forwards.recomputed} modules again; not counted twice"
            )
        if recorder.weights.bad_buffers:
            names = ", ".join(list(recorder.weights.bad_buffers)[:5])
            notes.append(f"not finite from the start, and not counted unless something follows from it: {names}")
        unsure = ""
        if found is not None:
            reading, hint = read(found.event, rows)
        else:
            gradients = recorder.gradients.not_finite()
            unsure, hint = doubt(recorder.filter, gradients)
            reading = "" if unsure else clean(recorder.filter, recorder.batch_number, gradients)
            self._keep_unfinished()
        return NumericsReport(
            event=None if found is None else found.event,
            reading=reading,
            hint=hint,
            frames=self._frames if found is None else found.frames,
            frames_from=self._frames_from if found is None else found.source,  # type: ignore[arg-type]
            not_replayed=self._why_ring if found is None else found.reason,
            notes=notes,
            history=rows,
            steps=recorder.step,
            batches=recorder.batch_number,
            eval_batches=recorder.forwards.eval_batches,
            generated_tokens=recorder.forwards.generated,
            events=self._events,
            **self._dropped_steps(),
            unsure=unsure,
            series=self._history.series(),
        )


_NEAR_HINT = "scale these values down, or run this module in a wider dtype"
