"""Writes down an operation that made, or first took, bad values: where it is, its operands, and how to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import parts
from mldebug.numerics.ops._kept import MAX_KEPT, KeptCall, copied, keep_call, random_state, replaced
from mldebug.numerics.ops._nodes import is_hooked
from mldebug.numerics.ops._op_names import OVERWRITES, base_name, short_name
from mldebug.numerics.ops._operands import changed_by, describe, facts_of, named, tensors_in
from mldebug.numerics.ops._origins import NAN, Origin, Sort, state_of
from mldebug.numerics.ops._places import ModuleStack, place_in_step
from mldebug.numerics.ops._source import line_in_backward, users_line
from mldebug.numerics.ring._stats import finite_absmax

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ops._nodes import Nodes, Parameters

_MAX_KEPT = 8  # operations of one step whose operands are copied
_MAX_WRITTEN = 64 << 20  # bytes of what one operation changes that are copied before it does


@dataclass
class Before:
    """What is known before an operation runs: of the tensors that it changes how bad they are and copies, by id."""

    states: dict[int, int] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    rng: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Ran:
    """One operation that has run."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before
    node: Any  # of the autograd graph, in backward

    def pairs(self) -> list[tuple[str, Any]]:
        """Its operands by name, as they are now."""
        return named(self.func, self.args, self.kwargs)

    def as_given(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Function and operands, with what they held before it changed them."""
        values = self.before.values
        return self.func, replaced(self.args, values), {k: replaced(v, values) for k, v in self.kwargs.items()}


class OriginMaker:
    """Makes the origins of one watch over operations."""

    def __init__(
        self, recorder: DebugUnderflowOverflow, modules: ModuleStack, nodes: Nodes, parameters: Parameters
    ) -> None:
        self._recorder = recorder
        self._modules, self._nodes, self._parameters = modules, nodes, parameters
        self._number = 0
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.step = step
        self._kept, self._room = 0, MAX_KEPT

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Before:
        """To be called before an operation runs."""
        changed = changed_by(func, args, kwargs)
        found = Before({id(tensor): state_of(tensor) for tensor in changed})
        if base_name(str(func)) not in OVERWRITES and sum(t.nbytes for t in changed) <= _MAX_WRITTEN:
            found.values = {id(tensor): copied(tensor) for tensor in changed if tensor.is_floating_point()}
        if self._recorder.dump_dir is not None:
            found.rng = random_state(func, [t for v in (*args, *kwargs.values()) for t in tensors_in(v)])
        return found

    def make(self, sort: Sort, ran: Ran, bad: list[Tensor], worst: int) -> Origin:
        """The origin of an operation. `bad` are those of its results that are; `worst` is how bad they are."""
        forwards, node = self._recorder.forwards, ran.node
        call = forwards.call
        self._number += 1
        origin = Origin(
            sort,
            self._number,
            worst,
            short_name(ran.func),
            "forward",
            self.step,
            max(forwards.batches - 1, 0) if call is None else call.batch,
            max(forwards.micro_batch - 1, 0) if call is None else call.micro_batch,
            dtype=bad[0].dtype,
            training=call is None or call.training,
        )
        if node is None:
            origin.owner, origin.line = self._modules.owner(self._recorder), users_line()
            if not self._modules.now:
                place_in_step(origin, ran.pairs(), self._parameters)
        else:
            origin.phase = "backward"
            origin.node, origin.node_id = node.name(), int(node._sequence_nr())
            forward = self._nodes.of(node)
            if forward is not None:
                origin.owner, origin.line, origin.forward_op = forward.owner, forward.line, forward.op
            if (line := line_in_backward()) is not None:
                origin.line, origin.hook = line, is_hooked(node)
            if (leaf := self._parameters.made_by(node)) is not None:
                origin.owner, origin.param = origin.owner or leaf[0], leaf[1]
        if origin.phase == "optimizer" and origin.param is not None and sort == "written":
            origin.sort = "made"  # a learning rate of inf is a number like others
        if origin.sort in ("made", "log", "given"):
            self._describe(origin, ran, bad)
        return origin

    def _describe(self, origin: Origin, ran: Ran, bad: list[Tensor]) -> None:
        func, args, kwargs = ran.as_given()
        pairs = named(func, args, kwargs)
        lost = {id(tensor) for tensor in changed_by(func, args, kwargs)} & set(ran.before.states)
        origin.operands = describe([pair for pair in pairs if id(pair[1]) not in lost])
        origin.results = describe([("result", tensor) for tensor in bad[:1]])
        kind = "nan" if origin.worst == NAN else "inf"
        origin.facts = facts_of(str(func), pairs, bad, kind) | (frozenset({"a gradient"} if origin.node else ()))
        origin.facts |= {"a hook"} if origin.hook else set()
        plain = [part for tensor in bad[:1] for part in parts(tensor)]
        if plain:
            origin.absmax, origin.numel = finite_absmax(plain[0]), plain[0].numel()
            origin.bad = int((~torch.isfinite(plain[0])).sum())
        if self._recorder.dump_dir is not None or (origin.node and origin.computed):
            if lost and base_name(str(func)) not in OVERWRITES:
                origin.not_kept = f"it changes an operand of more than {_MAX_WRITTEN >> 20} MB, which was not copied"
            elif self._kept < _MAX_KEPT:
                self._keep(origin, (func, args, kwargs), bad, ran.before.rng)

    def _keep(self, origin: Origin, call: Any, bad: Sequence[Tensor], rng: dict[str, Tensor]) -> None:
        keep: Callable[..., KeptCall | str] = keep_call
        kept = keep(*call, bad, rng, self._room)
        if isinstance(kept, KeptCall):
            origin.again = kept
            self._kept += 1
            self._room -= kept.nbytes
        else:
            origin.not_kept = kept
