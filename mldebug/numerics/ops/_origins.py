"""Where bad values came from: each operation's result is traced to the operation that first made it bad."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mldebug.numerics._tensors import parts, storage_of
from mldebug.numerics.ops._op_names import (
    COLLECTIVES,
    EMPTY,
    LOG_SPACE,
    LOGS,
    MOVES,
    SELECTS,
    SIGNS,
    SOFTMAX,
    takes_minus_infinity,
)  # fmt: skip
from mldebug.numerics.ops._operands import Operand
from mldebug.numerics.ops._source import Line

if TYPE_CHECKING:
    from mldebug.numerics._event import Phase
    from mldebug.numerics.ops._kept import KeptCall
    from mldebug.numerics.ring._records import Watched

# How bad a tensor is: the larger, the worse.
FINE, MINUS_INF, INF, NAN = range(4)

# made: a computation made it out of finite operands. log: -inf as the logarithm of zero, which only harms later.
# mask: -inf as one constant beyond the dtype's range. written, empty, received: by a constant, uninitialised memory,
# a collective. given: nobody saw it made: data, parameters, constants from before.
Sort = Literal["made", "log", "mask", "written", "empty", "received", "given"]


@dataclass(frozen=True)
class Fed:
    """An input of a root: by its path, and the index of its first bad sample."""

    root: Watched
    path: str
    sample: int | None


@dataclass(eq=False)
class Origin:
    """One operation that made, or first took, bad values."""

    sort: Sort
    number: int  # in the order of time
    worst: int  # MINUS_INF, INF or NAN
    op: str
    phase: Phase
    step: int
    batch: int
    micro_batch: int
    owner: Watched | None = None
    training: bool = True
    line: Line | None = None
    node: str = ""  # of backward: `SqrtBackward0`
    node_id: int = -1
    forward_op: str = ""  # the operation of the forward whose gradient is taken
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()
    facts: frozenset[str] = frozenset()
    param: str | None = None
    dtype: torch.dtype = torch.float32
    absmax: float | None = None
    bad: int | None = None
    numel: int | None = None
    fed: Fed | None = None  # it was made before a forward, and an input of it
    by_hand: bool = False  # of phase optimizer: no optimizer of torch's made it
    by_scaler: bool = False  # the loss scale was multiplied in
    again: KeptCall | None = field(default=None, repr=False)  # the operation with copies of its operands
    not_kept: str = ""  # why there is none
    found: bool = False  # it is of consequence: an event
    discarded: bool = False  # its bad elements were left out by a selection
    hook: bool = False  # of backward: a hook of the user's made it, on the gradient of that node
    compared: bool = False  # inside a formula it was compared with something, maybe to be left out

    @property
    def computed(self) -> bool:
        """Whether a computation made it, and nobody's will."""
        return self.sort in ("made", "log")


@dataclass(frozen=True)
class Taken:
    """A bad operand: how bad, and its origin where that is known."""

    tensor: Tensor
    worst: int
    origin: Origin | None


class Ledger:
    """The origin of every bad tensor that is alive, by its memory."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, Origin]] = {}
        self._limit = 4096

    def __bool__(self) -> bool:
        return bool(self._entries)

    def of(self, tensor: Tensor) -> Origin | None:
        if not self._entries or (storage := storage_of(tensor)) is None:
            return None
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry[1]

    def enter(self, tensor: Tensor, origin: Origin) -> None:
        """A computed origin stays where it is; what was meant to be there gives way to one."""
        storage = storage_of(tensor)
        if storage is None:
            return
        known = self._entries.get(storage._cdata)
        if known is None or not known[1].computed:
            # The weak reference keeps the address from being used again: the key stays this storage's.
            self._entries[storage._cdata] = StorageWeakRef(storage), origin  # type: ignore[no-untyped-call,unused-ignore]
        if len(self._entries) > self._limit:
            alive = [item for item in self._entries.items() if not _expired(item[1][0])]
            self._entries = dict(alive)
            self._limit = max(4096, 2 * len(self._entries))

    def forget(self, tensor: Tensor) -> None:
        """It was written over with good values."""
        storage = storage_of(tensor)
        if storage is not None:
            self._entries.pop(storage._cdata, None)


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors is a view of the other, or both of a third."""
    first, second = storage_of(one), storage_of(other)
    return first is not None and second is not None and bool(first._cdata == second._cdata)


def state_of(tensor: Tensor) -> int:
    """How bad the worst element is. Reads the device."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return FINE
    worst = FINE
    for part in parts(tensor):
        low, high = (float(value) for value in torch.aminmax(part))
        if low != low:
            return NAN
        worst = max(worst, INF if high == float("inf") else MINUS_INF if low == -float("inf") else FINE)
    return worst


def state_of_number(value: Any) -> int:
    """The same for a plain number, or the worst of a list of them."""
    if isinstance(value, (list, tuple)):
        return max((state_of_number(item) for item in value), default=FINE)
    if not isinstance(value, float) or math.isfinite(value):
        return FINE
    return NAN if value != value else INF if value > 0 else MINUS_INF


def without_bad_operands(base: str, namespace: str, worst: int, scalar: int, tensors: list[Tensor]) -> Sort:
    """The sort of a bad result of clean tensors. `scalar` is how bad the worst plain number among them is."""
    if base in EMPTY:
        return "empty"
    if namespace in COLLECTIVES:
        return "received"
    if scalar and (worst < NAN or scalar == NAN):
        return "written"
    if worst == MINUS_INF and base in LOGS:
        return "log"
    if (
        worst == MINUS_INF
        and base in ("to_copy", "copy", "mul", "rsub", "sub", "div", "add")
        and is_mask(base, tensors)
    ):
        return "mask"
    return "made"


def is_mask(base: str, tensors: list[Tensor]) -> bool:
    """Whether -inf stands for one constant: `(1 - mask) * -1e9` in float16, or float32's minimum as float16.

    Of the operands (the last of `tensors` is the result): a product has two different values, one of them made -inf; a
    cast makes -inf of one value only; and a sum makes it where one operand, the mask, is the lowest value of its dtype
    and the other, the scores, is not.
    """
    *sources, result = tensors
    lost = torch.isneginf(result)
    if base in ("add", "sub") and len(sources) == 2:
        low = [t.detach().expand_as(result)[lost] == torch.finfo(result.dtype).min for t in sources]
        if bool((low[0] ^ low[1]).all()):
            return True
    if base == "add":
        return False
    if base in ("to_copy", "copy"):
        source = next((t for t in sources if t.shape == result.shape and t.is_floating_point()), None)
        if source is None:
            return False
        gone = source.detach()[lost]
        return bool(gone.numel()) and bool(gone.min() == gone.max())
    kept = result.detach()[~lost]
    return (
        bool(kept.numel())
        and bool(kept.min() == kept.max())
        and not any(t.dim() and t.shape != result.shape for t in sources)
    )


def is_new(base: str, backward: bool, taken: list[Taken], worst: int, hidden: bool = False) -> bool:
    """Whether an operation on bad operands made something worse, that its operands do not account for.

    `hidden`: in backward, that the operation of the forward had a bad result, which the forward must have left out.
    """
    if base in MOVES:
        return False
    top = max(one.worst for one in taken)
    origins = [one.origin for one in taken if one.origin is not None]
    if backward:
        if any(o.phase == "backward" and o.computed for o in origins):
            return False
        if worst == MINUS_INF and top == MINUS_INF:
            return False
        if any(o.computed for o in origins):
            return True  # what forward left out by a selection comes back: 0 * inf
        if worst == NAN and hidden and not any(o.phase == "backward" for o in origins):
            return True  # the same of a constant
    else:
        computed = [o for o in origins if o.computed]
        if computed:
            return top == MINUS_INF < worst and base in SOFTMAX and all(o.sort == "log" for o in computed)
    if top == MINUS_INF:
        return worst == NAN or (worst == INF and base not in SIGNS)
    if top == INF:
        return worst == NAN and (backward or any(o.sort == "written" for o in origins))
    return False


def sums_minus_infinity(base: str, taken: list[Taken], worst: int) -> bool:
    """Whether -inf that was meant to be there goes into a sum with other values: as a log-probability it is lost."""
    meant = all(one.origin is None or not one.origin.computed for one in taken)
    return meant and base in ("sum", "mean") and worst == MINUS_INF


def is_worse(base: str, origin: Origin | None, worst: int) -> bool:
    """Whether an inf that was given became NaN here: that operation says more than the first that took it."""
    return origin is not None and origin.sort == "given" and origin.worst < NAN == worst and base not in MOVES


def swallows(base: str, origin: Origin, state: int, results: list[Tensor]) -> bool:
    """Whether finite results of bad operands hide trouble: not where bad elements were left out on purpose."""
    if base in SELECTS or base in MOVES or not any(t.is_floating_point() and t.numel() for t in results):
        return False
    return origin.sort == "made" or (
        origin.sort == "log" and not (state == MINUS_INF and (base in LOG_SPACE or takes_minus_infinity(base)))
    )


def _expired(ref: StorageWeakRef) -> bool:
    return bool(ref.expired())  # type: ignore[no-untyped-call,unused-ignore]
