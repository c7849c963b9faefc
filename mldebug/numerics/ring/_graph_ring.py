"""The statistics of tensors inside one CUDA graph: a ring of its own, which each replay of the graph fills again."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mldebug.numerics.ring._records import Site
from mldebug.numerics.ring._rings import SLOTS, CudaRing
from mldebug.numerics.ring._stats import Stats
from mldebug.numerics.ring._triton_ring import DTYPES, stats_of

_MOST = 4096  # tensors of one graph that are measured; a slot has 32 bytes
_MASK = SLOTS - 1
EMPTY = Stats(math.inf, -math.inf, math.inf)  # of nothing


class GraphRing:
    """Takes the place of the ring of a device while a graph is captured, and stands for its records afterwards.

    The kernels that fill it are part of the graph, so it has to live as long as that, and goes on being filled when
    nobody reads it any more. Make it before the capture: it allocates, compiles and waits.
    """

    def __init__(self, device: torch.device, site_of: Callable[[int], Site]) -> None:
        self._ring = CudaRing(device, _MOST)
        self._site_of: Callable[[int], Site] | None = site_of  # of a slot of the recorder's memory
        self.device = device
        self.sites: list[Site] = []
        self.numels = array("q")
        self.left_out = 0  # records beyond the size of the ring
        self._base = 0  # the slot of the first record in the latest replay
        self._earlier: OrderedDict[int, Any] = OrderedDict()  # the same of replays before it -> what they recorded
        sample = torch.zeros(16, device=device)
        for dtype in DTYPES:  # each is compiled now, for tensors at even and at odd addresses
            for part in (sample.to(dtype), sample.to(dtype)[1:]):
                self._ring.record(part, 0)
        self._ring.reset(0, 1)
        self._ring.clear_flag()

    # While the graph is captured. Nothing runs, so there is nothing to read.

    def record(self, tensor: Tensor, slot: int, strict: bool = False) -> None:
        index = len(self.sites)
        if index == _MOST or tensor.device != self.device or self._site_of is None:
            self.left_out += 1
            return
        self.sites.append(self._site_of(slot))
        self.numels.append(tensor.numel())
        self._ring.record(tensor, index, strict, reset=True)

    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None:
        for i, tensor in enumerate(tensors):
            self.record(tensor, base + i & _MASK, strict)

    def captured(self) -> None:
        """The capture is over."""
        self._site_of = None

    # After it.

    def replayed(self, base: int) -> None:
        """The graph is on its way on the current stream; its records have the slots from `base` on (around the end)."""
        count = len(self.numels)
        rows = self._ring.copy_rows(count)  # of the replay before: the device is about to overwrite them
        if rows is not None:
            self._earlier.pop(self._base, None)
            self._earlier[self._base] = rows
            if len(self._earlier) * count > SLOTS:  # their numbers are taken by others by now
                self._earlier.popitem(last=False)
        self._base = base
        self._earlier.pop(base, None)
        self._ring.publish(0, count)

    def flag(self, wait: bool) -> tuple[int, int] | None:
        seen = self._ring.flag(wait)
        if seen is None:
            return None
        alarm, near = (self._base + index & _MASK if index >= 0 else -1 for index in seen)
        return alarm, near

    def clear_flag(self) -> None:
        self._ring.clear_flag()

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        found: list[Stats] = []
        count, base, rows = len(self.numels), self._base, None  # the sites go with the recorder
        for slot in slots:
            if slot - base & _MASK >= count:
                base, rows = self._replay_of(slot, count)
            index = slot - base & _MASK
            if index >= count:
                found.append(EMPTY)
            elif rows is None:
                found += self._ring.stats([index])
            else:
                found += [Stats(*one) for one in stats_of(rows[index : index + 1])]
        return found

    def _replay_of(self, slot: int, count: int) -> tuple[int, Any]:
        """The base of the replay that had this slot, and what it recorded; None for the latest."""
        for base in reversed(self._earlier):
            if slot - base & _MASK < count:
                return base, self._earlier[base]
        return self._base, None

    # What the recorder asks of all rings, and needs no work here: a replay resets its slots and sends them off.

    def reset(self, first: int, count: int) -> None: ...

    def publish(self, first: int, count: int) -> None: ...


class NoRing:
    """Measures nothing: for what else is met while a graph is captured, and where Triton is missing."""

    def record(self, tensor: Tensor, slot: int, strict: bool = False) -> None: ...

    def record_many(self, tensors: Sequence[Tensor], base: int, strict: bool = False) -> None: ...

    def reset(self, first: int, count: int) -> None: ...

    def publish(self, first: int, count: int) -> None: ...

    def flag(self, wait: bool) -> tuple[int, int] | None:
        return -1, -1

    def clear_flag(self) -> None: ...

    def stats(self, slots: Sequence[int]) -> list[Stats]:
        return [EMPTY] * len(slots)
