"""What a report says beside the event: each thing once, and the first time as a warning too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mldebug.numerics._history import History, place_of
from mldebug.numerics._tell import warn
from mldebug.numerics._weights import join_name
from mldebug.numerics.gradients._trends import words
from mldebug.numerics.ring._stats import LIMIT

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ring._records import Watched

_NEAR_NOTES = 8  # tensors near the limit of their dtype that a report names


class Notes:
    """The notes of one recorder."""

    def __init__(self, recorder: DebugUnderflowOverflow, history: History) -> None:
        self._recorder, self._history = recorder, history
        self.warning = True  # diagnose() turns it off
        self._said: dict[str, None] = {}  # in order
        self._near: dict[str, str] = {}  # place -> note

    def add(self, text: str) -> None:
        self._said[text] = None

    def has(self, beginning: str) -> bool:
        return any(known.startswith(beginning) for known in self._said)

    def remark(self, text: str, hint: str = "") -> None:
        """Add a note, and warn of it the first time."""
        if text not in self._said:
            self.add(text)
            if self.warning:
                warn(f"mldebug: {text}\nhint: {hint}" if hint else f"mldebug: {text}")

    def near(self, number: int) -> None:
        """A value close to its dtype's limit: said once a place."""
        memory = self._recorder.memory
        if not memory.holds(number):
            return
        site, stats = memory.site(number), memory.stats([number])[0]
        place = place_of(site)
        if place in self._near or site.role == "gradient":  # a loss scale is meant to bring gradients up there
            return
        limit = LIMIT[site.dtype]
        note = (
            f"overflow ahead: {place} reached {stats.absmax:.3g} at step {self._recorder.step}, "
            f"{100 * stats.absmax / limit:.0f}% of what {str(site.dtype).removeprefix('torch.')} can hold ({limit:.4g})"
        )
        self._near[place] = note
        if self.warning and len(self._near) <= 5:
            warn(f"mldebug: {note}\nhint: {_NEAR_HINT}")

    def underflow(self, owner: Watched, name: str) -> None:
        """A gradient that has underflowed to zero: said once a parameter."""
        note = f"underflow: the gradient of {join_name(owner.name, name)} is all zero in float16, below tiny ones"
        self.remark(note, "scale the loss (torch.amp.GradScaler) or train in bfloat16")

    def all(self, before: int | None, found_trends: Sequence[dict[str, Any]]) -> list[str]:
        """All of them, as of the last forward, or of the last one before the batch of an event."""
        recorder = self._recorder
        notes = [*list(self._near.values())[:_NEAR_NOTES], *self._history.notes(before), *self._said]
        if len(self._near) > _NEAR_NOTES:
            notes.append(f"overflow ahead: {len(self._near) - _NEAR_NOTES} more tensors came near the limit")
        if recorder.forwards.recomputed:
            notes.append(
                f"activation checkpointing ran {recorder.forwards.recomputed} modules again; not counted twice"
            )
        notes += [words(trend) for trend in found_trends]
        if scaled := recorder.scaling_note():
            notes.append(scaled)
        if recorder.weights.bad_buffers:
            names = ", ".join(list(recorder.weights.bad_buffers)[:5])
            notes.append(f"not finite from the start, and not counted unless something follows from it: {names}")
        return notes


_NEAR_HINT = "scale these values down, or run this module in a wider dtype"
