"""Which operation of the forward made a node of the autograd graph, and which parameter a tensor is."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mldebug.numerics._tensors import storage_of

if TYPE_CHECKING:
    from mldebug.numerics._weights import Weights
    from mldebug.numerics.ops._origins import Origin
    from mldebug.numerics.ops._source import Line
    from mldebug.numerics.ring._records import Watched


def is_hooked(node: Any) -> bool:
    """Whether user code that a node of torch's own has called is a hook on its gradients; else it is a formula."""
    name = node.name()
    return not name.endswith("Backward") or name.startswith("BackwardHookFunction")


@dataclass
class Made:
    """An operation of the forward."""

    op: str
    owner: Watched | None
    line: Line | None
    origin: Origin | None = None  # of its result, if that is NaN or inf


class Nodes:
    """The operations of this step and the one before, by thread and sequence number.

    torch gives a node the number that stands when its operation begins; numbers count by thread.
    """

    def __init__(self) -> None:
        self._now: dict[tuple[int, int], Made] = {}
        self._before: dict[tuple[int, int], Made] = {}
        self._last: dict[int, int] = {}
        self._thread = threading.get_ident()

    def begin_step(self) -> None:
        self._before, self._now = self._now, {}

    def is_new(self, number: int) -> bool:
        """Whether a node with this number was made since the operation before: by the one under way."""
        thread = threading.get_ident()
        new = number >= 0 and self._last.get(thread, -1) != number
        self._last[thread] = number
        return new

    def enter(self, number: int, made: Made) -> None:
        self._now[threading.get_ident(), number] = made

    def of(self, node: Any) -> Made | None:
        """The operation that made a node. CUDA's backward has a thread of its own, and the forward's are looked up."""
        number = node._sequence_nr()
        for nodes in (self._now, self._before):
            for thread in (self._thread, threading.get_ident()):
                if (thread, number) in nodes:
                    return nodes[thread, number]
        return None


class Parameters:
    """The watched parameters by identity."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._seen: list[Tensor] | None = None
        self._by_id: dict[int, tuple[Watched, str]] = {}
        self._by_memory: dict[int, tuple[Watched, str]] = {}

    def of(self, tensor: Tensor) -> tuple[Watched, str] | None:
        """(module, dotted name) of a parameter, also of its `.data` or a view; None for any other tensor."""
        parameters = self._weights.parameters()
        if parameters is not self._seen:
            owners = self._weights.parameter_owners()
            self._seen = parameters
            self._by_id = {
                id(p): (owner, f"{owner.name}.{name}" if owner.name else name)
                for p, (owner, name, _) in zip(parameters, owners, strict=True)
            }
            self._by_memory = _by_memory(parameters, self._by_id)
        return self._by_id.get(id(tensor)) or self._by_memory.get(_memory(tensor))

    def made_by(self, node: Any) -> tuple[Watched, str] | None:
        """The parameter whose gradient a node makes, if it makes no other."""
        leaf = "AccumulateGrad" in node.name()
        nodes = [node] if leaf else [following for following, _ in node.next_functions if following is not None]
        return self.of(nodes[0].variable) if len(nodes) == 1 and hasattr(nodes[0], "variable") else None


def _by_memory(parameters: list[Tensor], by_id: dict[int, tuple[Watched, str]]) -> dict[int, tuple[Watched, str]]:
    """By their memory, where no two share it."""
    found: dict[int, tuple[Watched, str] | None] = {}
    for parameter in parameters:
        where = _memory(parameter)
        found[where] = None if where in found else by_id[id(parameter)]
    return {where: owner for where, owner in found.items() if owner is not None and where}


def _memory(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return 0 if storage is None else int(storage._cdata)
