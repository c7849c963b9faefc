"""Whether the loss scale alone makes a gradient overflow: the operation is run again with a smaller one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mldebug.numerics.ops._origins import FINE, INF, Origin, state_of


def judge_scale(origin: Origin, scaler: Any) -> None:
    """Add to the facts of an origin what a GradScaler has to do with it."""
    if origin.phase not in ("forward", "backward") or (origin.phase == "forward" and not origin.by_scaler):
        return
    scale = float(scaler._scale) if isinstance(getattr(scaler, "_scale", None), Tensor) else 1.0
    if scale > 1.0 and (origin.by_scaler or fits(origin, scale)):
        origin.facts |= {"by the loss scale"}
    elif scale < 1.0 and origin.worst <= INF and "finite operands" in origin.facts:
        origin.facts |= {"the loss scale is down"}


def fits(origin: Origin, scale: float) -> bool:
    """Whether the result is finite once one of the operands, the gradient, is smaller by the scale."""
    if origin.again is None:
        return origin.worst <= INF and "a zero divisor" not in origin.facts
    args = origin.again.args
    for i, smaller in _each_smaller(list(args), scale):
        result = origin.again.run([*args[:i], smaller, *args[i + 1 :]])
        if all(state_of(t) == FINE for t in result):
            return True
    return False


def _each_smaller(values: list[Any], scale: float) -> Iterator[tuple[int, Any]]:
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield i, value / scale
        elif isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
            yield i, [item / scale if isinstance(item, Tensor) else item for item in value]
