"""Tell -inf that was written on purpose from -inf that a computation made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from mldebug.numerics._frames import Frames
    from mldebug.numerics.ring._records import Watched

# Operations that write constants or move values: what they put there was meant to be there.
_WRITES = (
    "masked_fill", "where", "full", "fill", "scalar_tensor", "new_full", "triu", "tril", "copy", "_to_copy",
    "constant_pad", "index_put", "scatter", "lift_fresh", "empty", "new_empty",
)  # fmt: skip


class MinusInfinity(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """While active, finds the module whose operation first makes -inf out of operands without any: a log of zero."""

    def __init__(self, frames: Frames) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._frames = frames
        self.origin: Watched | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = self.origin is None and _any_minus_inf([*args, *kwargs.values()])
        output = func(*args, **kwargs)
        writes = func.name().removeprefix("aten::").startswith(_WRITES)
        if self.origin is None and not given and not writes and _any_minus_inf([output]):
            self.origin = self._frames.innermost()
        return output


def _any_minus_inf(values: list[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.numel() and not value.is_meta and bool(torch.isneginf(value).any()):
                return True
        elif isinstance(value, (list, tuple)):
            if _any_minus_inf(list(value)):
                return True
        elif isinstance(value, float) and value == -math.inf:
            return True
    return False
