"""How torch is asked for each collective, and the buffers that go into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mldebug.cluster.collectives._table import Collective

Call = Callable[[], None]


@dataclass
class Case:
    """A collective at one payload: where rank `rank` sends from and receives to, for shift after shift."""

    kind: Collective
    sent: int  # elements
    received: int
    place: str
    op: str
    root: int
    rank: int
    world: int

    @property
    def span(self) -> int:
        """Elements from one shift to the next."""
        return max(self.sent, self.received)

    def slices(self, send: Any, receive: Any, shift: int) -> tuple[Any, Any]:
        """The flat input and output. In place the input is a part of the output, or the output a part of the input."""
        start = shift * self.span
        if self.place == "out_of_place":
            return send[start : start + self.sent], receive[start : start + self.received]
        whole = receive[start : start + self.span]
        if self.kind.split == "receive":
            return whole[self.rank * self.sent : (self.rank + 1) * self.sent], whole
        if self.kind.split == "send":
            return whole, whole[self.rank * self.received : (self.rank + 1) * self.received]
        return whole, whole

    def call(self, source: Any, target: Any, nccl: Any = None) -> Call:
        """One call of the collective: by torch.distributed, or by NCCL itself where torch lacks it."""
        name = self.kind.name
        if nccl is not None and self.kind.by_nccl(self.place):
            made: Call = nccl.call(name, source, target, self.op, self.root)
            return made
        return _MAKERS[name](self, source, target)


def _reduce_op(op: str) -> Any:
    return getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper())


def _all_reduce(case: Case, source: Any, target: Any) -> Call:
    op = _reduce_op(case.op)
    return lambda: dist.all_reduce(target, op=op)


def _reduce(case: Case, source: Any, target: Any) -> Call:
    op = _reduce_op(case.op)
    return lambda: dist.reduce(target, case.root, op=op)


def _all_gather(case: Case, source: Any, target: Any) -> Call:
    return lambda: dist.all_gather_into_tensor(target, source)


def _reduce_scatter(case: Case, source: Any, target: Any) -> Call:
    op = _reduce_op(case.op)
    return lambda: dist.reduce_scatter_tensor(target, source, op=op)


def _alltoall(case: Case, source: Any, target: Any) -> Call:
    return lambda: dist.all_to_all_single(target, source)


def _broadcast(case: Case, source: Any, target: Any) -> Call:
    return lambda: dist.broadcast(target, case.root)


def _gather(case: Case, source: Any, target: Any) -> Call:
    parts = list(target.chunk(case.world)) if case.rank == case.root else None
    return lambda: dist.gather(source, parts, case.root)


def _scatter(case: Case, source: Any, target: Any) -> Call:
    parts = list(source.chunk(case.world)) if case.rank == case.root else None
    return lambda: dist.scatter(target, parts, case.root)


def _sendrecv(case: Case, source: Any, target: Any) -> Call:
    """To the next rank and from the one before, at once."""
    to, of = (case.rank + 1) % case.world, (case.rank - 1) % case.world
    both = [dist.P2POp(dist.isend, source, to), dist.P2POp(dist.irecv, target, of)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return exchange


_MAKERS: dict[str, Callable[[Case, Any, Any], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _sendrecv,
}
