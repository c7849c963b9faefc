"""Two models of one program, each with a recorder: what one hands on is bad where its last forward was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mldebug.numerics import _hub
from mldebug.numerics._report import NumericsReport

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._recorder import DebugUnderflowOverflow


class Elsewhere:
    """What one recorder knows of the others of its process, and they of it."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self.explained: Event | None = None  # the last event of a forward or of its weights, responded to or not

    def behind(self, event: Event) -> str:
        """An event that came into this model from outside, and that of another recorder that explains it; "" if none
        does."""
        if not (event.module is None or (event.role == "input" and event.module == "")):
            return ""
        others = [other for other in _hub.RECORDERS if other is not self._recorder]
        first = next((text for other in others if (text := other.elsewhere.trouble)), "")
        return f"{_said(event)}: it follows from the event of another recorder, {first}" if first else ""

    @property
    def trouble(self) -> str:
        """The event of the last forward, if that was bad, in words."""
        event, forwards, model = self.explained, self._recorder.forwards, self._recorder.model
        if event is None or forwards.bad_batch < forwards.batches - 1:
            return ""
        return _said(event) if model is None or not event.module else f"{_said(event)}, of {type(model).__name__}"


def _said(event: Event) -> str:
    return NumericsReport(event=event, reading="", hint="").verdict
