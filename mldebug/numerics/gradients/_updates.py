"""Why the update of an optimizer spoiled a parameter, as far as its options, its states and the gradients tell."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._weights import join_name

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._weights import Weights
    from mldebug.numerics.gradients._gradients import GradientNorms

_OPTIONS = ("lr", "weight_decay")
_NEAR = 1e-3  # of the range of the dtype: an update that stays below this is not what took a weight out of it


class Updates:
    """What is remembered of the optimizers of one recorder. A device is read only for an event."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._bad: deque[int] = deque(maxlen=64)  # steps with a learning rate, say, that was no finite number
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An optimizer is about to step."""
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            if step not in self._bad and not all(_is_finite(group.get(name)) for name in _OPTIONS):
                self._bad.append(step)

    def cause(self, event: Event, norms: GradientNorms) -> str:
        """The key of a row of the table of causes, for a parameter that an update spoiled while the gradients of its
        step were finite; "" if none fits.

        That the update went beyond the range follows from what is left: gradients, parameter and options were finite.
        Not so where the optimizer cannot have moved a weight that far: then other code has changed it after the step.
        """
        if event.step in self._bad:
            return "learning rate"
        param = None if event.param is None else self._weights.find(event.param)
        if param is not None:
            holding = [optimizer for optimizer in self._optimizers if _group(optimizer, param)]
            norm = next((n for owner, name, _, n in norms.each if join_name(owner.name, name) == event.param), math.inf)
            if key := next(filter(None, (_divides(optimizer, param) for optimizer in holding)), ""):
                return key
            if norm == 0.0 and event.kind == "nan":  # of a finite weight and a gradient of 0: it took a norm, say
                return "zero denominator of the optimizer"
            if any(_furthest(optimizer, param, norm) < _NEAR * event.limit for optimizer in holding):
                return ""
        return "update beyond the range" if event.kind == "inf" else ""

    def of_state(self, event: Event) -> str:
        """The same for what an optimizer keeps of a parameter."""
        param = None if event.param is None else self._weights.find(event.param)
        keys = ("" if param is None else _divides(optimizer, param) for optimizer in self._optimizers)
        return next(filter(None, keys), "")


def _group(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    """The options of a parameter; empty if another optimizer has it."""
    return next((group for group in optimizer.param_groups if any(p is param for p in group["params"])), {})


def _furthest(optimizer: torch.optim.Optimizer, param: Tensor, norm: float) -> float:
    """How far an update can move one weight, weight decay left aside; inf where it is not known.

    Adam and its kin divide by the size of the gradients: a few learning rates. SGD without momentum moves by the
    learning rate times the gradient, no element of which is larger than its norm.
    """
    rate, state = _group(optimizer, param).get("lr"), optimizer.state.get(param, {})
    if not isinstance(rate, float):
        return math.inf
    if isinstance(optimizer, torch.optim.SGD) and not _group(optimizer, param).get("momentum"):
        return rate * norm
    return 100 * rate if "exp_avg_sq" in state else math.inf


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_cpu or bool(torch.isfinite(value).all())
    return not isinstance(value, (int, float)) or math.isfinite(value)


def _divides(optimizer: torch.optim.Optimizer, param: Tensor) -> str:
    """The key of a cause where an optimizer has divided by zero (a weight is bad where what is kept of it is 0, and eps
    is 0 in that dtype), or taken the root of a negative number; "" elsewhere."""
    state, group = optimizer.state.get(param), _group(optimizer, param)
    eps, bad = group.get("eps"), ~torch.isfinite(param.detach())
    if not isinstance(state, dict) or not isinstance(eps, (int, float)):
        return ""
    kept = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and value.shape == param.shape and value.is_floating_point()
    }
    for value in kept.values():
        lost = float(torch.tensor(eps, dtype=value.dtype)) == 0.0
        if lost and bool((bad & (value == 0)).any()):
            return "eps too small" if value.dtype is torch.float16 else "zero denominator of the optimizer"
    squares, mean = kept.get("square_avg"), kept.get("grad_avg")
    if (
        squares is not None
        and mean is not None
        and bool((bad & (torch.addcmul(squares, mean, mean, value=-1) < 0)).any())
    ):
        return "negative variance of the optimizer"
    return ""
