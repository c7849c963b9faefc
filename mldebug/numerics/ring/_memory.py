"""The recorder's memory: numbered records, their call sites, and the rings that hold their statistics."""

from __future__ import annotations

import math
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mldebug.numerics.ring._graph_ring import GraphRing, NoRing
from mldebug.numerics.ring._records import Batch, Call, Site
from mldebug.numerics.ring._rings import SLOTS, HostRing, Ring, ring_for, spans
from mldebug.numerics.ring._stats import Stats

_MASK = SLOTS - 1
_CHUNK = 1024  # slots are made ready in such portions
_CHUNK_MASK = _CHUNK - 1
_SMALL = 1024  # elements; a smaller tensor is measured again rather than recognised


class Memory:
    """Numbers every record; record n lives in slot n modulo SLOTS of the ring of its device.

    The rings share the numbering, so the order of numbers is the order of execution on all devices together.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.unread = 0  # the first record whose verdict has not been read yet
        self.calls: deque[Call] = deque(maxlen=4096)
        self._sites: list[Site | None] = [None] * SLOTS
        self._source = array("q", bytes(8 * SLOTS))  # the slot with the statistics: another one for an alias
        self._device = array("h", bytes(2 * SLOTS))  # whose ring holds them, -1 for the host
        self._numel = array("q", bytes(8 * SLOTS))
        self._rings: dict[int, Ring] = {-1: HostRing()}
        self._aside: tuple[dict[int, Ring], int] | None = None  # while a CUDA graph is captured
        self.early: tuple[int, Site, Stats] | None = None  # an alarm read before its record was overwritten
        self._last: weakref.ref[Tensor] | None = None
        self._last_version = self._last_slot = 0
        self._last_numel = -1
        # What compiled graphs measured and returned in this forward: its memory, what it looked like, its slot.
        self._made: list[tuple[Any, tuple[object, ...], int]] = []

    def record(self, site: Site, tensor: Tensor) -> None:
        """Measure a plain tensor (see `_tensors`). The hot path: a few microseconds beside the reduction itself."""
        numel = tensor.numel()
        if not numel:
            return
        sequence = self.sequence
        slot = sequence & _MASK
        if not sequence & _CHUNK_MASK:
            self._prepare(slot)
        self.sequence = sequence + 1
        self._sites[slot] = site
        self._numel[slot] = numel
        device = self._device[slot] = tensor.get_device()
        if numel == self._last_numel and self._is_last(tensor):
            self._source[slot] = self._last_slot
            return
        if self._made and (made := self._known_slot(tensor)) >= 0:
            self._source[slot] = made
            return
        self._source[slot] = slot
        ring = self._rings.get(device)
        if ring is None:
            ring = self._add_ring(tensor)
        ring.record(tensor, slot, site.strict)
        if numel < _SMALL:
            return  # a loss between two views of the logits must not hide that they are one
        if tensor.is_inference():
            self._last = None
        else:
            self._last = weakref.ref(tensor)
            self._last_version = tensor._version
            self._last_slot, self._last_numel = slot, numel

    def _is_last(self, tensor: Tensor) -> bool:
        """The tensor that was measured last, or a view of all of it, unchanged: a module hands on its child's output.

        The last one is still alive, so that its address cannot be another tensor's.
        """
        last = self._last() if self._last is not None else None
        return (
            last is not None
            and (
                last is tensor
                or (
                    last.data_ptr() == tensor.data_ptr()
                    and last.dtype is tensor.dtype
                    and last.is_contiguous()
                    and tensor.is_contiguous()
                )
            )
            and tensor._version == self._last_version
        )

    def record_all(self, batch: Batch) -> None:
        """Measure many plain tensors (parameters, buffers): one launch per dtype where that can be."""
        self.forget_last()
        ring = self._rings.get(batch.device) or self._add_ring(batch.tensors[0])
        base = self._take_numbers(batch.device, batch.sites, batch.numels)
        ring.record_many(batch.tensors, base & _MASK, batch.strict)

    def _take_numbers(self, device: int, sites: Sequence[Site], numels: array[int]) -> int:
        """The first of the numbers of these records, which are in the ring of `device`."""
        base, count, done = self.sequence, len(sites), 0
        self.sequence = base + count
        for chunk in range(-(-base // _CHUNK), -(-self.sequence // _CHUNK)):
            self._prepare(chunk * _CHUNK & _MASK)
        for a, b in spans(base, count, SLOTS):
            self._sites[a:b] = sites[done : done + b - a]
            self._source[a:b] = array("q", range(a, b))
            self._device[a:b] = array("h", [device]) * (b - a)
            self._numel[a:b] = numels[done : done + b - a]
            done += b - a
        return base

    def begin_capture(self, ring: GraphRing | None) -> None:
        """What is recorded from now on goes into a CUDA graph: it has not run, and gets no numbers yet."""
        self.forget_last()
        self._aside = self._rings, self.sequence
        self._rings = {-1: NoRing()}
        if ring is not None:
            self._rings[ring.device.index] = ring

    def end_capture(self) -> None:
        self.forget_last()
        if self._aside is not None:
            (self._rings, self.sequence), self._aside = self._aside, None

    def replayed(self, key: int, ring: GraphRing) -> None:
        """A CUDA graph was launched: what it records gets numbers. `key` is a device of its own (below -1)."""
        base = self._take_numbers(key, ring.sites, ring.numels)
        self._rings[key] = ring
        ring.replayed(base & _MASK)

    def in_graph(self, number: int) -> bool:
        """Whether a record is of a tensor inside a CUDA graph."""
        return self._device[number & _MASK] < -1

    def forget_graph(self, key: int) -> None:
        """A graph is gone: what its last replay recorded cannot be read any more."""
        if key in self._rings:
            self._rings[key] = NoRing()

    def record_rows(self, sites: Sequence[Site], rows: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
        """Measure tensors of one device by the largest magnitudes of their rows, in one launch; `values` are they
        themselves where they outlive the graph that made them, and may be met again."""
        base = self.sequence
        self.record_all(Batch(rows[0].get_device(), False, list(zip(sites, rows, strict=True))))
        for i, value in enumerate(values):
            if value is not None and value.numel() >= _SMALL and not value.is_inference():
                self._made.append((_storage_ref(value), _mark(value), base + i & _MASK))

    def _known_slot(self, tensor: Tensor) -> int:
        """The slot of a tensor that was measured in the graph that returned it; -1 if there is none."""
        mark = None if tensor.is_inference() or not self._made else _mark(tensor)
        return next((slot for storage, made, slot in self._made if made == mark and not storage.expired()), -1)

    def publish(self, first: int, end: int) -> None:
        """Send what was recorded in [first, end) on its way to the host, without waiting."""
        for ring in self._rings.values():
            ring.publish(first & _MASK, min(end - first, SLOTS))

    def flags(self, wait: bool) -> tuple[int | None, int | None] | None:
        """(first alarm, first near-limit record) as record numbers; None if the devices have not got there yet."""
        seen = [ring.flag(wait) for ring in self._rings.values()]
        if None in seen:
            return None
        alarms = [self._number(pair[0]) for pair in seen if pair and pair[0] >= 0]
        nears = [self._number(pair[1]) for pair in seen if pair and pair[1] >= 0]
        self.unread = self.sequence
        if self.early is not None:
            alarms = [self.early[0]]
        return min(alarms, default=None), min(nears, default=None)

    def clear_flags(self) -> None:
        self.early = None
        for ring in self._rings.values():
            ring.clear_flag()

    def site(self, number: int) -> Site:
        site = self._sites[number & _MASK]
        assert site is not None
        return site

    def numel(self, number: int) -> int:
        return self._numel[number & _MASK]

    @property
    def on_host(self) -> bool:
        """Whether all records are of CPU tensors: their verdict is there without a wait."""
        return len(self._rings) == 1

    def holds(self, number: int) -> bool:
        """Whether a record is still there, not overwritten by a newer one."""
        return self.sequence - SLOTS <= number < self.sequence

    def stats(self, numbers: Sequence[int]) -> list[Stats]:
        """The statistics of records, as of the last publish; waits for it."""
        found: dict[int, Stats] = {}
        groups: dict[int, list[int]] = {}
        for number in numbers:
            groups.setdefault(self._device[number & _MASK], []).append(number)
        for device, group in groups.items():
            stats = self._rings[device].stats([self._source[number & _MASK] for number in group])
            found.update(zip(group, stats, strict=True))
        return [_extremes(found[number]) if self._is_extremes(number) else found[number] for number in numbers]

    def _is_extremes(self, number: int) -> bool:
        site = self._sites[self._source[number & _MASK]]
        return site is not None and site.extremes

    def bad(self, numbers: Sequence[int]) -> list[int]:
        """Those of the records that hold NaN, inf, or a -inf that cannot be a mask's."""
        stats = self.stats(numbers)
        return [n for n, found in zip(numbers, stats, strict=True) if found.alarms(self.site(n).strict)]

    def forget_last(self) -> None:
        """The last tensor's object may not be compared any more: something else ran in between."""
        self._last = None
        self._made.clear()

    def _number(self, slot: int) -> int:
        """The newest record number that lives in a slot."""
        newest = self.sequence - 1
        return newest - ((newest - slot) & _MASK)

    def _prepare(self, slot: int) -> None:
        if self.sequence - self.unread >= SLOTS - 2 * _CHUNK:
            self._look_early()
        for ring in self._rings.values():
            ring.reset(slot, _CHUNK)

    def _look_early(self) -> None:
        """One forward is about to fill the whole ring: keep the first alarm before it is overwritten."""
        self.publish(self.unread, self.sequence)
        seen = self.flags(wait=True)
        # A bad gradient is no event by itself.
        if self.early is None and seen is not None and seen[0] is not None and self.site(seen[0]).role != "gradient":
            self.early = seen[0], self.site(seen[0]), self.stats([seen[0]])[0]

    def _add_ring(self, tensor: Tensor) -> Ring:
        ring = self._rings[tensor.get_device()] = NoRing() if self._aside is not None else ring_for(tensor.device)
        return ring


def _storage_ref(tensor: Tensor) -> Any:
    ref: Any = StorageWeakRef
    return ref(tensor.untyped_storage())


def _mark(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version


def _extremes(stats: Stats) -> Stats:
    """The statistics of a tensor of which only [min, max] was recorded: nothing is known of its other elements."""
    return Stats(math.nan, math.nan) if stats.has_nan else Stats(stats.lo, stats.hi)
