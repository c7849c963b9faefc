"""A ring of tensor statistics in GPU memory, filled by one kernel per tensor, with no host synchronisation.

The host chooses the slots and resets them before use; it sees the statistics after `publish`, which copies a range
of slots to pinned memory behind the recorded work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch

_kernels: Any
try:
    from mldebug.numerics.ring import _kernels
except ImportError:  # no Triton here
    _kernels = None

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_SLICE = 1 << 30  # elements of one launch: offsets stay in 32 bits
_CHUNK = 1 << 16  # elements of one program of a batch
_TABLES = 8  # batches whose chunk tables are kept
_ADDRESS, _SIZE, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype")
_EMPTY = (2**31 - 1, -(2**31), 2**31 - 1, 0, 0, 0, 0, 0)
_HEADER = (-1, -1, 0, 0, 0, 0, 0, 0)


class SlotStats(NamedTuple):
    """What one slot says about the elements folded into it.

    `lo`, `hi` and `absmin` leave NaN out; where all is NaN, or nothing was recorded, they are inf, -inf and inf.
    `subnormal` counts by the tensor's own dtype. Zeros are not subnormal.
    """

    lo: float
    hi: float
    absmin: float
    nan: int
    posinf: int
    neginf: int
    zero: int
    subnormal: int


class TritonRing:
    """Statistics of the last `slots` tensors on one CUDA device (32 bytes each; 4 MB for the default of 2**17).

    Work goes to the current stream. A slot must be reset before it is recorded again (a new ring is reset). The
    first alarm is the first slot, in the order of one stream, that saw NaN or +inf; the first near is the first one
    with a finite value of at least a quarter of its dtype's limit. -inf, and a value that is exactly the dtype's
    lowest, are neither: attention masks hold them.

    Constructing it compiles a kernel; any exception of Triton (no C compiler, say) comes from there.

        ring = TritonRing(torch.device("cuda")); ring.record(x, 0); ring.publish(0, 1)
        ring.flag(wait=True), ring.read([0])
    """

    SLOTS = 1 << 17

    def __init__(self, device: torch.device, slots: int = SLOTS) -> None:
        if _kernels is None:
            raise RuntimeError("Triton is not installed")
        self.slots = slots
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._index: int = self.device.index
        # Made outside inference mode, so that the ring may be written to in and out of it.
        with torch.inference_mode(False), torch.cuda.device(self._index):
            header = torch.tensor([_HEADER], dtype=torch.int32, device="cpu")
            empty = torch.tensor([_EMPTY], dtype=torch.int32, device="cpu")
            self._mirror = torch.cat([header, empty.expand(slots, 8)]).pin_memory()
            self._ring = self._mirror.to(self.device)
            self._header = header.to(self.device)
            self._empty = empty.to(self.device)
            self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._seen = self._mirror.numpy()  # the same memory
        self._stale = True  # nothing published since the flag was cleared
        self._base: int = self._ring.data_ptr()
        self._cap = 2 * torch.cuda.get_device_properties(self._index).multi_processor_count
        self._aligned: dict[torch.dtype, Any] = {}
        self._unaligned: dict[torch.dtype, Any] = {}
        self._many: dict[tuple[torch.dtype, bool], Any] = {}
        self._tables: dict[tuple[Any, ...], list[tuple[torch.Tensor, int, Any]]] = {}
        self._streams: set[int] = set()
        # The public calls for these cost the host more than the rest of a record. CPU builds of torch lack them.
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice
        self._current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        torch.cuda.synchronize(self.device)  # whichever stream comes first finds the ring filled
        self.record(self._empty.view(torch.float32), 0)  # compiles: a Triton that cannot shows it here
        self.reset(0, 1)
        self.clear_flag()

    @staticmethod
    def available(device: torch.device) -> bool:
        """Whether a ring works on this device: Triton is here, and it is an NVIDIA GPU of capability 7.0 or more."""
        if _kernels is None or device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
            return False
        return torch.cuda.get_device_capability(device) >= (7, 0)

    def record(self, tensor: torch.Tensor, slot: int, *, strict: bool = False, reset: bool = False) -> None:
        """Fold a contiguous, not empty float16, bfloat16 or float32 tensor into `slot` (0 <= slot < slots).

        With `strict`, -inf alarms too.
        With `reset`, the slot is reset first, on the same stream: what a CUDA graph must capture. A dtype's first
        record compiles a kernel, so record it once before the capture.
        """
        index = self._index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self.record(tensor, slot, strict=strict, reset=reset)
        if reset:
            self._fill(slot, slot + 1)
        size = tensor.numel()
        address = tensor.data_ptr()
        stream = self._current_stream(index)
        if stream not in self._streams:
            self._meet(stream)
        launch = (self._unaligned if address & 15 else self._aligned).get(tensor.dtype)
        if launch is None or size > _SLICE:
            return self._record_slowly(tensor, slot, stream, strict)
        grid = (size + 8191) >> 13  # tiles of _kernels.BLOCK
        if grid > self._cap:
            grid = self._cap
        launch(grid, stream, self._base, address, size, slot, 1 if strict else 0)

    def record_many(self, tensors: Sequence[torch.Tensor], base: int, *, strict: bool = False) -> None:
        """Fold tensor i into slot (base + i) % slots, with one launch for each dtype; at most `slots` tensors.

        Empty tensors leave their slot as it is. If several tensors alarm, the flag gets the first one of the list.
        The table of addresses is kept on the device and rebuilt when an address, a size or the list changes.
        """
        index = self._index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self.record_many(tensors, base, strict=strict)
        stream = self._current_stream(index)
        if stream not in self._streams:
            self._meet(stream)
        key = (stream, *map(_ADDRESS, tensors), *map(_SIZE, tensors), *map(_DTYPE, tensors))
        launches = self._tables.get(key)
        if launches is None:
            launches = self._build(tensors)
            while len(self._tables) >= _TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = launches
        count, slots = len(tensors), self.slots
        for table, chunks, launch in launches:
            launch(chunks, stream, self._base, table.data_ptr(), base, count, slots, int(strict))

    def reset(self, first: int, count: int) -> None:
        """Make `count` slots from `first` on (around the end) empty; enqueued on the current stream."""
        first %= self.slots
        end = first + count
        self._fill(first, min(end, self.slots))
        if end > self.slots:
            self._fill(0, end - self.slots)

    def publish(self, first: int, count: int) -> None:
        """Enqueue the copy of the flags and of `count` slots from `first` on (around the end) to the host."""
        first %= self.slots
        end = first + count
        self._copy(0, 1)
        self._copy(1 + first, 1 + min(end, self.slots))
        if end > self.slots:
            self._copy(1, 1 + end - self.slots)
        self._event.record(torch.cuda.current_stream(self._index))
        self._stale = False

    def flag(self, wait: bool) -> tuple[int, int] | None:
        """(first alarm, first near) as of the last `publish`, -1 for none; None if it is under way and not `wait`."""
        if self._stale:
            return -1, -1
        if wait:
            self._event.synchronize()
        elif not self._event.query():
            return None
        return int(self._seen[0, 0]), int(self._seen[0, 1])

    def clear_flag(self) -> None:
        """Forget both flags, on the current stream and, until the next `publish`, on the host."""
        with torch.no_grad():
            self._ring[:1].copy_(self._header, non_blocking=True)
        self._stale = True

    def read(self, slots: Sequence[int]) -> list[SlotStats]:
        """The statistics of these slots as of the last `publish` that held them; waits for that copy."""
        self._event.synchronize()
        return stats_of(self._seen[numpy.asarray(slots, dtype=numpy.int64) + 1])

    def copy_rows(self, count: int) -> Any:
        """The first `count` slots as of the last `publish`, for `stats_of`; None where it is under way."""
        return self._seen[1 : 1 + count].copy() if self._event.query() else None

    def _meet(self, stream: int) -> None:
        # The allocator must not hand the ring's memory out while this stream may still write to it.
        if not torch.cuda.is_current_stream_capturing():
            self._streams.add(stream)
            self._ring.record_stream(torch.cuda.current_stream(self._index))

    def _record_slowly(self, tensor: torch.Tensor, slot: int, stream: int, strict: bool) -> None:
        dtype, size, address = tensor.dtype, tensor.numel(), tensor.data_ptr()
        launches = self._unaligned if address & 15 else self._aligned
        for start in range(0, size, _SLICE):
            part = min(size - start, _SLICE)
            grid = min(-(-part // _kernels.BLOCK), self._cap)
            args = (self._base, address + start * tensor.element_size(), part, slot, int(strict))
            if dtype in launches:
                launches[dtype](grid, stream, *args)
            else:
                types = (torch.int32, _kernels.BITS[dtype])
                constants = (_kernels.FORMATS[dtype], launches is self._aligned)
                launches[dtype] = _kernels.launch_and_bind(_kernels.record_kernel, types, constants, grid, *args)

    def _build(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int, Any]]:
        groups: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
        for i, tensor in enumerate(tensors):
            address, size, width = tensor.data_ptr(), tensor.numel(), tensor.element_size()
            rows = groups.setdefault((tensor.dtype, address % 16 == 0), [])
            for start in range(0, size, _CHUNK):
                rows.append((address + start * width, i << 32 | min(size - start, _CHUNK)))
        launches = []
        for group, rows in groups.items():
            if rows:
                table = self._upload(rows)
                launches.append((table, len(rows), self._many.get(group) or self._bind_many(group)))
        return launches

    def _bind_many(self, group: tuple[torch.dtype, bool]) -> Any:
        # The launch that binds must change nothing: its only chunk has no elements.
        args = (self._base, self._upload([(0, 0)]).data_ptr(), 0, 1, self.slots, 0)
        types, constants = (torch.int32, torch.int64), (_kernels.FORMATS[group[0]], group[1])
        launch = _kernels.launch_and_bind(_kernels.record_many_kernel, types, constants, 1, *args)
        self._many[group] = launch
        return launch

    def _upload(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        # From pinned memory, which its allocator keeps until the copy is done: no synchronisation.
        table = torch.tensor(rows, dtype=torch.int64, device="cpu").pin_memory()
        return table.to(self.device, non_blocking=True)

    def _fill(self, first: int, end: int) -> None:
        with torch.no_grad():
            self._ring[1 + first : 1 + end].copy_(self._empty.expand(end - first, 8), non_blocking=True)

    def _copy(self, first: int, end: int) -> None:
        with torch.no_grad():
            self._mirror[first:end].copy_(self._ring[first:end], non_blocking=True)


def stats_of(rows: Any) -> list[SlotStats]:
    """What rows of a ring, as numbers of 32 bits, say."""
    keys = rows[:, :2]
    bits = numpy.where(keys < 0, keys ^ 0x7FFFFFFF, keys).astype(numpy.int32)
    extremes = bits.view(numpy.float32)
    absmin = rows[:, 2].copy().view(numpy.float32)
    counts = rows[:, 3:].astype(numpy.uint32)
    stats = []
    for (low, high), small, count in zip(extremes.tolist(), absmin.tolist(), counts.tolist(), strict=True):
        if small != small:  # an empty slot's bits read as NaN
            low, high, small = float("inf"), float("-inf"), float("inf")
        stats.append(SlotStats(low, high, small, *count))
    return stats
