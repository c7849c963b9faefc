"""What the judge found: an event, and what is shown with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mldebug.numerics._event import Event

if TYPE_CHECKING:
    from mldebug.numerics.ops._kept import KeptCall


@dataclass
class Found:
    """An event with its frames and where they come from ("replay", "ring", "live", or "" for none)."""

    event: Event
    frames: list[str]
    source: str
    reason: str = ""
    call: KeptCall | str | None = None  # the operation with its operands, or why these were not kept
    bad_weights: Sequence[str] = ()  # with the event of a parameter or buffer: all that are bad now
    announced: bool = False  # the other ranks of the job have been told
