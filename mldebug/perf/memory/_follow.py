"""What became of the tensors that a growth was seen by."""

from __future__ import annotations

from typing import Any

from mldebug.perf.memory._sites import Site

_LOST = 0.1  # a leak loses nothing; a buffer that is full loses its oldest with each step


class Followed:
    """The tensors that were alive at `step`, by weak references and by the place that made them.

    What is gone at the first look passed on by itself, such as the last batch; from then on all should stay.
    """

    def __init__(self, step: int, refs: dict[Site, list[Any]]) -> None:
        self.step = step
        self._refs = refs
        self._stayed: dict[Site, int] = {}

    def lost(self) -> set[Site]:
        """The places of which more than a tenth of what was there at the first look is gone."""
        self._refs = {site: [ref for ref in refs if not ref.expired()] for site, refs in self._refs.items()}
        if not self._stayed:
            self._stayed = {site: len(refs) for site, refs in self._refs.items()}
        return {site for site, refs in self._refs.items() if len(refs) < (1 - _LOST) * self._stayed[site] or not refs}
