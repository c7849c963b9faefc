"""What the recorder returns: the event, the frames before it, the notes, and the numbers of the last steps."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mldebug.core.errors import MldebugError
from mldebug.core.report import Report, jsonable
from mldebug.numerics._event import Event
from mldebug.numerics._frames import COLUMNS, PREFIX
from mldebug.numerics._reading import operation_lines

_RECENT = 8  # steps of history that the text shows


class NumericsError(MldebugError, ValueError):
    """Raised when a NaN, inf or overflow was found. A ValueError, as the transformers class raises.

    `.report` is the NumericsReport with the event and its frames (None for a stop by abort_after_batch_num).

        try: train()
        except NumericsError as error: print(error.report.event.module)
    """

    def __init__(self, message: str, hint: str = "", report: NumericsReport | None = None) -> None:
        super().__init__(message, hint)
        self.report = report


class NumericsWarning(UserWarning):
    """Trouble that did not stop the run: an event under on_event="warn", or an overflow that is near."""


@dataclass(frozen=True)
class NumericsReport(Report):
    """What a recorder saw.

    `event` is None for a healthy run; `unsure` then says why it cannot be called clean, if it cannot: a pattern of
    `include` matches no module, or a gradient norm is not finite and no forward was. `frames` are texts, the last one
    being the module of the event; `frames_from` says whether they come from a replay of the forward, from the
    recorder's ring (outputs only; `not_replayed` says why) or from live tensors. `history` has a dict per step: loss,
    grad_norm, absmax and where it was; in the step of the event also "event". `dropped` counts the optimizer steps
    that on_event="skip" left out, `dropped_steps` are the first of them. `trends` are gradient norms that explode or
    vanish: what, which module, the norm before and after, the steps. In a
    distributed job `rank` is the rank of this report, `first_rank` the first that saw an event and `ranks` a dict for
    each event of the job, the first one first; on a rank that saw nothing itself, `event` is the first one's, with its
    `rank`. `series` holds abs max by tensor and batch for
    the heat map, `dtypes` the dtype of each of these tensors and `batch_steps` the step of each batch (not in to_dict).

        report = mldebug.diagnose(model, step, steps=100)
        report.event and report.event.module
    """

    schema: ClassVar[int] = 1

    event: Event | None = None
    reading: str = ""
    hint: str = ""
    frames: list[str] = field(default_factory=list)
    frames_from: Literal["replay", "ring", "live", ""] = ""
    not_replayed: str = ""
    notes: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    batches: int = 0
    eval_batches: int = 0
    generated_tokens: int = 0
    events: int = 0
    dropped: int = 0
    dropped_steps: list[int] = field(default_factory=list)
    rank: int = 0
    first_rank: int | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    unsure: str = ""
    trends: list[dict[str, Any]] = field(default_factory=list)
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict, repr=False)
    dtypes: dict[str, str] = field(default_factory=dict, repr=False)
    batch_steps: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return not self.unsure if self.event is None else self.event.benign

    @property
    def verdict(self) -> str:
        """The answer in one line."""
        event = self.event
        if event is None and not self.batches:
            return "no model was called in this process: nothing was watched"
        if event is None and self.unsure:
            return self.unsure
        if event is None:
            return f"no nan, no inf in {self.batches} forward passes, {self.steps} steps"
        if event.benign:
            return f"benign: {self._seen(event)}"
        return self._seen(event)

    def _seen(self, event: Event) -> str:
        rank = f", rank {event.rank}" if event.rank or self.first_rank is not None else ""
        if event.role == "input" and " of " in event.name:
            seen = "nan made" if event.kind == "nan" else "inf made"
            return f"{seen} by the code of {event.where}, seen as {event.name}, step {event.step}, forward{rank}"
        if event.role == "input" and event.module == "":
            by = f": {event.op}" if event.op is not None else ""
            return f"{event.kind} in the model's {event.name}, step {event.step}, {event.phase}{rank}{by}"
        place = f", {event.where}" if event.module is None else f" of {event.where}"
        kind = "lost precision" if event.kind == "precision" else event.kind
        by = f": {event.op}" if event.op is not None else ""
        return f"{kind} in the {_what(event)}{place}, step {event.step}, {event.phase}{rank}{by}"

    def to_dict(self) -> dict[str, Any]:
        found = super().to_dict()
        for key in ("series", "dtypes", "batch_steps"):
            found.pop(key)
        found["event"] = None if self.event is None else jsonable(self.event.to_dict())
        found["verdict"] = self.verdict
        return found

    def text(self, color: bool = False, width: int = 80) -> str:
        """The answer first, then what to do, then the frames and the numbers of the last steps."""
        lines = textwrap.wrap(self.verdict, width, subsequent_indent="  ")
        if self.first_rank is not None:
            lines += ["", *textwrap.wrap(self._who_was_first(), width)]
        if self.reading:
            lines += ["", *textwrap.wrap(self.reading, width)]
        if self.hint:
            lines += textwrap.wrap(f"hint: {self.hint}", width, subsequent_indent="      ")
        if self.event is not None and self.event.operation is not None:
            lines += ["", *operation_lines(self.event, width)]
        if self.frames and not (self.event is None and self.frames_from == "live"):  # those were printed as they ran
            lines += ["", self.frames_text(width).rstrip()]
        if self.history:
            lines += ["", *_history_table(self.history[-_RECENT:], width)]
        for note in [*self._dropped_note(), *self.notes]:
            lines += ["", *_wrapped(f"note: {note}", width)]
        return "\n".join(lines)

    def _who_was_first(self) -> str:
        others = sorted({row["rank"] for row in self.ranks} - {self.first_rank})
        also = f" Events were seen on rank {', '.join(map(str, others))} too." if others else ""
        if self.rank == self.first_rank:
            return f"Rank {self.rank} of the job was the first to see an event.{also}"
        first = f"Rank {self.first_rank} was first"
        if self.event is not None and self.event.rank == self.rank:
            row = self.ranks[0]
            seen = f"{row['kind']} in step {row['step']}, {row['phase']}"
            return f"{first}: {seen}. What follows is rank {self.rank}'s own."
        return f"{first}; nothing bad was seen on rank {self.rank} before it stopped with it.{also}"

    def _dropped_note(self) -> list[str]:
        if not self.dropped:
            return []
        more = ", ..." if self.dropped > len(self.dropped_steps) else ""
        named = f"{', '.join(map(str, self.dropped_steps))}{more}"
        words = "step was" if self.dropped == 1 else "steps were"
        return [f'{self.dropped} of {self.steps} {words} dropped, as on_event is "skip": step {named}']

    def frames_text(self, width: int = 80) -> str:
        """The frames under the classic header, in lines of at most `width` columns. `frames` has them as they are."""
        batch = self.event.batch if self.event is not None else self.batches
        lines = [f"Detected inf/nan during batch_number={batch}"] if self.event is not None else []
        lines.append(f"Last {len(self.frames)} forward frames:")
        if self.frames_from == "ring":
            why = f"; not replayable: {self.not_replayed}" if self.not_replayed else ""
            lines += textwrap.wrap(f"(outputs only, as recorded{why})", width)
        body = "\n".join(self.frames).strip("\n").splitlines()
        if COLUMNS not in body[:2]:  # the first frame of a batch brings them
            lines.append(COLUMNS)
        return "\n".join([*lines, *(_frame_line(line, width) for line in body)]) + "\n"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a heat map of abs max by tensor and batch as PNG. Needs the `plot` extra."""
        from mldebug.numerics.page._plot import heat_map

        heat_map(self, path)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one page for a browser, which loads nothing else; with `path` it is written there as well.

        The event, its operation, operands and frames, and a heat map of abs max and headroom (powers of two up to the
        largest value of the dtype) by tensor and batch. Below 3 MB for 10,000 tensors in 200 batches. Raises
        MldebugError where `path` cannot be written.

            report.html("report.html")
        """
        from mldebug.numerics.page._html import page, write_page

        document = page(self)
        if path is not None:
            write_page(document, path)
        return document


def _wrapped(text: str, width: int) -> list[str]:
    """Lines that keep paths whole, so that they can be copied."""
    breaks = "/" not in text
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=breaks, break_long_words=breaks)


def _what(event: Event) -> str:
    return event.role if event.name == event.role else f"{event.role} {event.name}"


def _frame_line(line: str, width: int) -> str:
    """A line that is too long is indented less, and then loses the front of its name."""
    if len(line) <= width:
        return line
    if line.startswith(PREFIX):
        return _tail(line.strip(), width).rjust(width)
    return line[: len(PREFIX) + 1] + _tail(line[len(PREFIX) + 1 :], width - len(PREFIX) - 1)


def _history_table(rows: list[dict[str, Any]], width: int) -> list[str]:
    lines = [f"{'step':>6} {'loss':>10} {'grad norm':>10} {'abs max':>10}  in"]
    for row in rows:
        cells = [_number(row.get(key)) for key in ("loss", "grad_norm", "absmax")]
        start = f"{row['step']:>6} {cells[0]} {cells[1]} {cells[2]}  "
        lines.append(f"{start}{_tail(row.get('where', ''), width - len(start))}".rstrip())
        event = row.get("event", "")
        if event and not event.endswith(f" in {row.get('where')}"):  # of a gradient: abs max is of outputs
            lines.append(f"{'':>6} {_tail(event, width - 7)}")
    return lines


def _tail(text: str, width: int) -> str:
    """The end of a dotted name says more than its beginning."""
    if len(text) <= width:
        return text
    end = text[-(width - 3) :]
    return f"...{end[end.find('.') + 1 :] if '.' in end[: width // 2] else end}"


def _number(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:10.3e}"
