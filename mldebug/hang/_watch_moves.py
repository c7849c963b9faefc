"""What moves in a process whose stack stands still: a slow download, a slow disk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mldebug.hang._evidence import Sample

_WAKES = 2  # one may be a signal that somebody sent


def stirred(samples: Sequence[Sample]) -> bool:
    """Whether the main thread woke up or read and wrote between the looks, those that the looks caused left aside.

    A thread that waits for ever in recv() or read() does neither. One that asks again and again does as well: this
    tells nothing about a loop that polls.
    """
    wakes = io = 0
    for first, second in pairwise(samples):
        if "woke" in first and "woke" in second:
            wakes += max(0, second["woke"][0] - first["woke"][1])
        if "io" in first and "io" in second:
            io += max(0, second["io"][0] - first["io"][1])
    return wakes >= _WAKES or io > 0
