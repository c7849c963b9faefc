"""What the formulas of gradients compute: a bad value counts once its node hands it on and nobody leaves it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mldebug.numerics.ops._op_names import MOVES
from mldebug.numerics.ops._operands import describe, tensors_in
from mldebug.numerics.ops._origins import FINE, Origin, state_of

_LEAVE_OUT = ("where", "masked_fill")  # in a later formula they leave bad elements out on purpose: that of clamp, say


class Formulas:
    """The origins of one backward whose consequence is not known yet."""

    def __init__(self, find: Callable[[Origin], None], guarded: Callable[..., Any]) -> None:
        self._find, self._guarded = find, guarded
        self._pending: list[Origin] = []

    def clear(self) -> None:
        self._pending = []

    def add(self, origin: Origin, node: Any) -> None:
        """A formula has made something bad: the gradients that its node hands on are looked at when it ends."""
        if not any(other.node_id == origin.node_id for other in self._pending):
            handles: list[Any] = []

            def ran(gradients: Any, taken: Any) -> None:
                for handle in handles:
                    handle.remove()
                self._guarded(self._handed_on, origin.node_id, gradients)

            handles.append(node.register_hook(ran))
        self._pending.append(origin)

    def taken(self, origin: Origin, base: str, number: int, results: list[Tensor]) -> None:
        """An operation took a bad value and its result is clean. `number` is that of its node."""
        if number == origin.node_id:
            if any(tensor.is_floating_point() for tensor in results):
                origin.discarded |= base not in MOVES  # inside the formula; what it hands on may be fine
            else:
                origin.compared = True
        elif base in _LEAVE_OUT:
            origin.discarded = True
        else:
            self._find(origin)

    def spread(self, origin: Origin, base: str, number: int, worst: int, bad: list[Tensor]) -> None:
        """A bad gradient goes on: in another node, or on its way inside of its own."""
        if not origin.node or not origin.computed:
            return
        if number != origin.node_id:
            if base not in MOVES:
                self._find(origin)
            return
        origin.discarded = False
        if worst > origin.worst:
            origin.worst = worst  # an inf inside the formula, and NaN is what leaves it
            origin.results = describe([("gradient", bad[0])])

    def end(self) -> None:
        """The backward is over. What nobody left out has gone into a gradient."""
        pending, self._pending = self._pending, []
        for origin in pending:
            if not origin.discarded:
                self._find(origin)

    def _handed_on(self, number: int, gradients: Any) -> None:
        mine = [origin for origin in self._pending if origin.node_id == number]
        bad = any(state_of(tensor) > FINE for tensor in tensors_in(gradients))
        left = ([o for o in mine if not (o.discarded or o.compared)] or mine) if bad else []
        for origin in left:
            origin.discarded = False
        self._pending = [origin for origin in self._pending if origin.node_id != number] + left
