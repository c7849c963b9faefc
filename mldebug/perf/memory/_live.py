"""Which tensors are alive, by the place that made them: what every operation returns is noted, by weak references."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from mldebug.perf.memory._sites import Site, site_of_frame

_MOST = 300_000  # storages that are kept in view
LATER = " of a later one"  # added to the kind of what belongs to a model or an optimizer that came with a later step


@dataclass(frozen=True)
class Live:
    """Tensors that were made at one place and are alive: `nbytes` of memory in `count` pieces. `kind` is parameter,
    gradient, optimizer state, buffer, or tensor for all others."""

    site: Site
    kind: str
    nbytes: int
    count: int


class LiveTensors:
    """Notes the memory of every tensor that operations make, from `begin` to `end`, and says which of it is alive.

    Nothing is kept alive and no value is changed. Each operation costs some 10 to 20 us of the host's time while it
    notes. Memory that an operation did not make (numpy's, shared, mapped files) and what compiled code makes inside
    itself are not seen.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self._table: dict[int, tuple[StorageWeakRef, int, Site]] = {}
        self._sites: dict[Site, Site] = {}
        self._mode = _Mode(self._note)
        self._entered = False
        self.full = False
        self._pid = os.getpid()

    def begin(self) -> bool:
        """Begin to note; False where that must wait: the program has a mode of its own open, which would end ours."""
        if self._entered:
            self._mode.active = True
            return True
        if torch._C._len_torch_dispatch_stack():
            return False
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._entered = self._mode.active = True
        return True

    def end(self) -> None:
        """Note no more. Where a mode of the program lies over ours, ours stays, does nothing, and goes later."""
        self._mode.active = False
        if self._entered and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._entered = False

    @property
    def noting(self) -> bool:
        return self._mode.active

    def look(self, known: dict[int, str] | None = None) -> list[Live]:
        """What is alive, the largest first. `known` says the kind of a storage by its address (`_cdata`)."""
        known = known or {}
        sums: dict[tuple[Site, str], list[int]] = {}
        dead = []
        for key, (ref, nbytes, site) in self._table.items():
            if ref.expired():  # type: ignore[no-untyped-call]
                dead.append(key)
                continue
            entry = sums.setdefault((site, known.get(key, "tensor")), [0, 0])
            entry[0] += nbytes
            entry[1] += 1
        for key in dead:
            del self._table[key]
        found = [Live(site, kind, nbytes, count) for (site, kind), (nbytes, count) in sums.items()]
        return sorted(found, key=lambda live: -live.nbytes)

    def site_of(self, tensor: torch.Tensor) -> Site | None:
        """Where the memory of a tensor was made, if that was noted."""
        entry = self._table.get(tensor.untyped_storage()._cdata)
        return entry[2] if entry is not None else None

    def alive_at(self, sites: set[Site], most: int = 1000) -> dict[Site, list[Any]]:
        """Weak references to what was made at these places and is alive: `most` of each, evenly taken, by age."""
        found: dict[Site, list[Any]] = {site: [] for site in sites}
        for ref, _, site in self._table.values():
            if site in found and not ref.expired():  # type: ignore[no-untyped-call]
                found[site].append(ref)
        return {site: refs[:: max(1, -(-len(refs) // most))] for site, refs in found.items()}

    def forget(self) -> None:
        """Drop what is noted."""
        self._table.clear()
        self._sites.clear()

    def _note(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # A storage that is in the table keeps its address while the weak reference to it is there.
            if key in self._table or tensor.device.type == "meta":
                return
            nbytes = storage.nbytes()
        except (RuntimeError, NotImplementedError, AttributeError):  # a tensor of a kind that has no memory
            return
        if not nbytes:
            return
        if os.getpid() != self._pid:  # a forked process, such as a worker of a DataLoader, is not watched
            self._mode.active = False
            return
        if len(self._table) >= _MOST:
            self._drop_dead()
            if len(self._table) >= _MOST:
                self.full, self._mode.active = True, False
                return
        site = site_of_frame(sys._getframe(2), self._where())
        ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._table[key] = (ref, nbytes, self._sites.setdefault(site, site))

    def _drop_dead(self) -> None:
        self._table = {key: entry for key, entry in self._table.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what each operation returns."""

    active = False

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    # Compiled code stays compiled: the mode is off while it is made, and on when it runs.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    # Else torch wraps the method in a way that loads its compiler, which takes seconds and memory.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.active:
            if isinstance(result, torch.Tensor):
                self._note(result)
            elif isinstance(result, (tuple, list)):
                for item in result:
                    if isinstance(item, torch.Tensor):
                        self._note(item)
        return result


def kinds_of(
    models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer], by_address: bool = False
) -> dict[int, str]:
    """The kind of each storage that a model or an optimizer holds, by its `_cdata` or by the address of its memory."""
    kinds: dict[int, str] = {}

    def enter(tensor: Any, kind: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor the part that is here
        if isinstance(tensor, torch.Tensor):
            try:
                storage = tensor.untyped_storage()
                kinds.setdefault(storage.data_ptr() if by_address else storage._cdata, kind)
            except (RuntimeError, NotImplementedError, AttributeError):
                return

    for model in models:
        for parameter in model.parameters():
            enter(parameter, "parameter")
            enter(parameter.grad, "gradient")
        for buffer in model.buffers():
            enter(buffer, "buffer")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                enter(parameter, "parameter")
                enter(parameter.grad, "gradient")
        _enter_state(optimizer.state, enter, 0)
    return kinds


def _enter_state(value: Any, enter: Callable[[Any, str], None], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        enter(value, "optimizer state")
    elif depth < 4 and hasattr(value, "values"):
        for item in list(value.values()):
            _enter_state(item, enter, depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            _enter_state(item, enter, depth + 1)
