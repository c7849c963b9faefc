"""What is done about an event: report, raise, warn, skip; the history and the output file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mldebug.core.errors import MldebugError
from mldebug.core.report import write
from mldebug.numerics._elsewhere import Elsewhere
from mldebug.numerics._event import Event
from mldebug.numerics._history import History
from mldebug.numerics._notes import Notes
from mldebug.numerics._output import LinesFile
from mldebug.numerics._reading import clean, doubt, read
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._tell import say, warn
from mldebug.numerics._tensors import parts
from mldebug.numerics.distributed._together import named
from mldebug.numerics.gradients._left_out import LeftOut
from mldebug.numerics.gradients._trends import trends

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.distributed._together import Together
    from mldebug.numerics.replay._found import Found

_DROPPED_STEPS = 10  # that a report names
_DUMPS = 8  # events whose step is written to dump_dir
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
        self._benign: Found | None = None  # an overflow of the loss scale: reported if nothing worse comes
        self._events = 0
        self._frames: list[str] = []  # of the last live batch, or of a forward that did not return
        self._frames_from = self._why_ring = ""
        self.elsewhere = Elsewhere(recorder)
        self.left_out = LeftOut()
        self._followed = ""  # what came from another model that has a recorder, and the event of that
        self._bad_step = -1  # the last step with an event in its forward or backward
        self._drop = ""  # "yes" from a bad forward until the next one begins
        self._dropped: set[int] = set()  # steps whose gradients were taken away
        self.busy = False  # the user's own on_event is running
        self.user_error: BaseException | None = None  # what it raised: not our failure
        self._quiet = False
        self.printing = True  # diagnose() and the command turn it off
        self.notes = Notes(recorder, self._history)
        self.last_word: Callable[[NumericsReport], object] | None = None  # shows the report of a rank that is ended

    # Events.

    def handle(self, found: Found, restore: Sequence[Callable[[], None]] = ()) -> Event:
        """Do what `on_event` says; "raise" is a NumericsError. `restore` gives buffers their values from before."""
        found = self._recorder.refine(found)
        event = found.event
        if event.benign:
            self._benign = self._benign or found
            return event
        follows = self._follows(event)
        if event.role == "parameter" and event.phase != "forward":  # as the forward that has just run had it
            self._bad_step = self._recorder.step
        elif event.phase in ("forward", "backward"):
            self._bad_step = event.step
        if not follows and (first := self.elsewhere.behind(event)):
            follows, self._followed = True, self._followed or first
            self._drop = "yes" if self.drops and event.phase != "backward" else self._drop
            self.notes.remark(first)
        if follows:
            for name in found.bad_weights:
                self._recorder.weights.set_aside(name)
            return event
        self.left_out.saw(event, self._recorder.weights.spoiled)
        together = self._recorder.ranks.together
        self.announce(found)
        if together is not None:
            together.settle()
        report = self._dumped(self._build(found), found)
        self._events += 1
        self._first = self._first or report
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
            self._raise(report)
        else:
            if self._on_event == "skip":
                self._drop = "" if event.phase == "backward" else "yes"  # an optimizer with good gradients may step
                for give_back in restore:
                    give_back()
            if told:
                warn(f"mldebug: {report.verdict}\nhint: {report.hint}")
        return event

    def _follows(self, event: Event) -> bool:
        """Whether a bad forward or backward that has been told of made this of the gradients or weights of its step."""
        return event.step == self._bad_step and event.phase in ("backward", "optimizer") and event.op is None

    def _raise(self, report: NumericsReport) -> NoReturn:
        if self._recorder.ranks.together is not None:
            self._recorder.ranks.together.leave()
        raise NumericsError(f"{type(self._recorder).__name__}: {report.verdict}", report.hint, report)

    @property
    def raises(self) -> bool:
        return self._on_event == "raise"

    @property
    def drops(self) -> bool:
        return self._on_event == "skip"

    def announce(self, found: Found, waits: bool = False) -> None:
        """Tell the other ranks of an event; with `waits` this one goes on to its optimizer step before it stops."""
        together = self._recorder.ranks.together
        event = found.event
        if event.role != "gradient" and not self._follows(event) and not self.elsewhere.behind(event):
            self.elsewhere.explained = event
        if together is not None and not (found.announced or found.event.benign or self._follows(found.event)):
            found.announced = True
            wish = waits and self._recorder.forwards.sharded
            together.announce(found.event, self._recorder.step, self.raises, waits, wish)

    def stop_with(self, together: Together) -> None:
        """An event of another rank: report it and stop as that rank does."""
        if self._quiet or not self.raises:
            together.asked = None
            return
        together.settle()
        self._first = self._first or self._build(None)
        if self._lines is not None:
            self._lines.write_event(self._first)
        if self.printing:
            say(f"\n{self._first.text()}\n")
        self._raise(self._first)

    def write_last(self, found: Found | None) -> None:
        """The report of a rank that is about to be ended, from another thread."""
        recorder = self._recorder
        if recorder.memory.on_host:
            report = self._build(found)
        else:  # what is on the device may be behind the collective
            event = None if found is None else found.event
            reading, hint = ("", "") if event is None else read(event, [])
            numbers: dict[str, Any] = {"steps": recorder.step, "batches": recorder.batch_number, "events": self._events}
            report = self._of_all(NumericsReport(event=event, reading=reading, hint=hint, **numbers))
        if self._lines is not None:
            self._lines.write_event(report)
        with contextlib.suppress(OSError, ValueError, MldebugError):
            if self.last_word is not None:
                self.last_word(report)
            else:
                write(f"\n{report.text()}\n\n", sys.stdout if self.printing else sys.stderr)

    def _dumped(self, report: NumericsReport, found: Found) -> NumericsReport:
        """The report with a note of where the step was written, where dump_dir asks for it."""
        if self._recorder.dump_dir is None or self._events >= _DUMPS:
            return report
        from mldebug.numerics.bundle._bundle import dump

        note = dump(self._recorder.dump_dir, report, found.call, self._recorder.inputs)
        self.notes.add(note)
        return replace(report, notes=[*report.notes, note])

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

    def drop_if_bad(self, optimizer: torch.optim.Optimizer, scaler: Any, ours: bool, step: int) -> bool:
        """on_event="skip": take the gradients of a bad batch away, so that the optimizer has nothing to apply; whether
        that was done.

        A batch is bad if its forward was, or if its gradients are not finite; looking at those waits for backward.
        In a distributed job all ranks drop it if it is bad on one.
        """
        together = self._recorder.ranks.together if ours else None
        if self._on_event != "skip":
            if together is not None and not any(user.ranks.drops for user in together.users):
                together.abstain()
            return False
        if self._recorder.steps.inside_scaler(optimizer, scaler):
            return False
        grads = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        scaled = scaler is not None and scaler.is_enabled()  # inf from the loss scale: the scaler sees it by itself
        bad = self._drop == "yes" or not (scaled or all(_is_finite(p.grad) for p in grads))
        said = None if together is None else together.agree(self._recorder, bad)
        if said is None and together is not None:  # only what all ranks see may decide: averaged gradients
            self.notes.remark(_NOT_ALL)
            said = not (scaled or all(_is_finite(p.grad) for p in grads))
        sure = bad if said is None else said
        if not grads or not sure:
            return False
        if ours and not scaled and not self._drop and step not in self._dropped:
            self._recorder.guard(self._recorder.judge_dropped, optimizer, step)
        if sure and not bad:
            self._recorder.forwards.backwards.restore_buffers()
        if scaled:
            # A scaler insists on having looked at gradients before they go.
            state = scaler._per_optimizer_states[id(optimizer)]
            if state["stage"].name == "READY":
                scaler.unscale_(optimizer)
        for param in grads:
            param.grad = None
        self._dropped.add(step)
        return True

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
        found = self._first
        if found is None:
            return self._build(self._benign)
        recorder = self._recorder
        return replace(
            self._of_all(found),
            notes=[*found.notes, *self.left_out.notes],
            events=self._events,
            steps=recorder.step,
            batches=recorder.batch_number,
            **self._dropped_steps(),
        )

    def _dropped_steps(self) -> dict[str, Any]:
        return {"dropped": len(self._dropped), "dropped_steps": sorted(self._dropped)[:_DROPPED_STEPS]}

    def finish(self) -> None:
        """The last steps' numbers."""
        if self._recorder.memory.on_host:
            self.left_out.applied(self._recorder.gradients.of(self._recorder.step - 1))
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
        self._bad_step, self.elsewhere.explained, self._followed = -1, None, ""
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

    def _of_all(self, report: NumericsReport) -> NumericsReport:
        """The report of this rank with what the other ranks of the job have seen."""
        together = self._recorder.ranks.together
        first = None if together is None else together.first()
        if together is None or first is None:
            return report
        report = replace(report, rank=together.rank, first_rank=first.rank, ranks=named(together.events()))
        if report.event is not None and not report.event.benign:
            return report
        reading, hint = read(first.event, [])
        return replace(
            report, event=first.event, reading=reading, hint=hint, frames=[], frames_from="", not_replayed="", unsure=""
        )

    def _build(self, found: Found | None) -> NumericsReport:
        return self._of_all(self._build_own(found))

    def _build_own(self, found: Found | None) -> NumericsReport:
        recorder = self._recorder
        rows = self._history.rows(None if found is None else found.event)
        found_trends = trends(recorder.gradients.taken())
        notes = self.notes.all(None if found is None else found.event.batch, found_trends)
        unsure = ""
        if found is not None:
            reading, hint = read(found.event, rows)
        else:
            gradients = recorder.gradients.not_finite()
            unsure, hint = doubt(recorder.filter, gradients)
            if self._followed:
                unsure, hint = self._followed, "look at the report of that recorder: what is bad here came from there"
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
            trends=found_trends,
            series=self._history.series(),
            dtypes=self._history.dtypes(),
            batch_steps=self._history.batch_steps(),
        )


def _is_finite(grad: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(part).all()) for part in parts(grad))


_NOT_ALL = (
    'on_event="skip" is not agreed on by all ranks: some have no recorder with it, or have not answered. They are not '
    "waited for again; from here on each rank drops a step only for gradients that are not finite"
)
