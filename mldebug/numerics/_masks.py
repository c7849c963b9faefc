"""Tell infinities that were written on purpose from those that a computation made."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from mldebug.numerics._frames import Frames
    from mldebug.numerics._records import Watched

# Operations that write constants or move values: what they put there was meant to be there.
_WRITES = (
    "masked_fill", "where", "full", "fill", "scalar_tensor", "new_full", "triu", "tril", "copy", "_to_copy",
    "constant_pad", "index_put", "scatter", "lift_fresh", "empty", "new_empty",
)  # fmt: skip


class WrittenInfinity(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """While active, tells the modules that write infinities from the one that first computes one.

    An infinity is computed where an operation returns one and none of its operands holds one; an overflow, a log of
    zero. `computed` is the module of the first such operation.
    """

    def __init__(self, frames: Frames) -> None:
        super().__init__()  # type: ignore[no-untyped-call,unused-ignore]
        self._frames = frames
        self._writers: list[Watched | None] = []
        self.computed: Watched | None = None
        self._any_computed = False

    def written_by(self, module: Watched) -> bool:
        """Whether this module wrote infinities and nothing computed one."""
        return not self._any_computed and any(writer is module for writer in self._writers)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _any_infinite([*args, *kwargs.values()])
        output = func(*args, **kwargs)
        if _any_infinite([output]):
            name = func.name().removeprefix("aten::")
            if name.startswith(_WRITES):
                self._writers.append(self._frames.innermost())
            elif not given:
                if not self._any_computed:
                    self.computed = self._frames.innermost()
                self._any_computed = True
        return output


def _any_infinite(values: list[Any]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.numel() and not value.is_meta and bool(torch.isinf(value).any()):
                return True
        elif isinstance(value, (list, tuple)):
            if _any_infinite(list(value)):
                return True
        elif isinstance(value, float) and math.isinf(value):
            return True
    return False
