"""L2 norms of many tensors in GPU memory by two launches, however many there are.

torch's own foreach norm costs the host several microseconds a tensor. Here the table of addresses is kept on the
device, and training puts its gradients where they were in the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mldebug.numerics.ring._triton_ring import DTYPES, _kernels

_CHUNK = 1 << 16  # elements of one program
_TABLES = 4
_DTYPES = frozenset(DTYPES)
_ADDRESS, _SIZE, _DTYPE = Tensor.data_ptr, Tensor.numel, attrgetter("dtype")


class _Table(NamedTuple):
    launches: list[tuple[Tensor, int, Any]]  # (rows of chunks, how many, what launches them)
    partial: Tensor  # sum of squares by chunk
    spans: Tensor  # first chunk and number of chunks by tensor


class TritonNorms:
    """L2 norms on one CUDA device. Work goes to the current stream; nothing waits.

    norms = TritonNorms(torch.device("cuda", 0))
    norms.of([gradient_1, gradient_2])  # a float64 vector of two norms
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Any, ...], _Table] = {}
        self._squares: dict[tuple[torch.dtype, bool], Any] = {}
        self._roots: Any = None

    @staticmethod
    def takes(tensors: Sequence[Tensor]) -> bool:
        """Whether these are dense float tensors of one CUDA device."""
        devices = set(map(Tensor.get_device, tensors))
        if len(devices) != 1 or min(devices) < 0 or not tensors[0].is_cuda:
            return False
        return set(map(_DTYPE, tensors)) <= _DTYPES and all(map(Tensor.is_contiguous, tensors))

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The L2 norm of each tensor, as float64; they must have passed `takes`. Not finite only where an element is
        not."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        key = (stream, *map(_ADDRESS, tensors), *map(_SIZE, tensors), *map(_DTYPE, tensors))
        with torch.cuda.device(self._device):
            table = self._tables.get(key)
            if table is None:
                while len(self._tables) >= _TABLES:
                    del self._tables[next(iter(self._tables))]
                table = self._tables[key] = self._build(tensors)
            norms = torch.empty(len(tensors), dtype=torch.float64, device=self._device)
            for rows, count, launch in table.launches:
                launch(count, stream, table.partial.data_ptr(), rows.data_ptr())
            addresses = (norms.data_ptr(), table.partial.data_ptr(), table.spans.data_ptr())
            if self._roots is None:
                types = (torch.float64, torch.float64, torch.int64)
                kernel = _kernels.norms_kernel
                self._roots = _kernels.launch_and_bind(kernel, types, (), len(tensors), *addresses)
            else:
                self._roots(len(tensors), stream, *addresses)
        return norms

    def _build(self, tensors: Sequence[Tensor]) -> _Table:
        groups: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
        spans, chunk = [], 0
        for tensor in tensors:
            address, size, width = tensor.data_ptr(), tensor.numel(), tensor.element_size()
            rows = groups.setdefault((tensor.dtype, address % 16 == 0), [])
            spans.append((chunk, -(-size // _CHUNK)))
            for start in range(0, size, _CHUNK):
                rows.append((address + start * width, chunk << 32 | min(size - start, _CHUNK)))
                chunk += 1
        partial = torch.empty(max(chunk, 1), dtype=torch.float64, device=self._device)
        launches = []
        for group, rows in groups.items():
            if rows:
                table = self._upload(rows)
                launches.append((table, len(rows), self._squares.get(group) or self._bind(group, partial)))
        return _Table(launches, partial, self._upload(spans))

    def _bind(self, group: tuple[torch.dtype, bool], partial: Tensor) -> Any:
        # The launch that binds has a chunk without elements; what it writes is overwritten.
        rows = self._upload([(0, 0)])
        args = (partial.data_ptr(), rows.data_ptr())
        constants = (_kernels.FORMATS[group[0]], group[1])
        launch = _kernels.launch_and_bind(_kernels.squares_kernel, (torch.float64, torch.int64), constants, 1, *args)
        self._squares[group] = launch
        return launch

    def _upload(self, rows: list[tuple[int, int]]) -> Tensor:
        # From pinned memory, which its allocator keeps until the copy is done: no synchronisation.
        return torch.tensor(rows, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
