"""Gradient norms before each optimizer step: their history, and gradients that underflow to zero."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._records import Watched
from mldebug.numerics._tensors import is_plain

if TYPE_CHECKING:
    from mldebug.numerics._weights import Weights

# Gradients this small on average lie where float16 has only subnormals: below them everything rounds to zero.
_STEPS = 256  # steps that are remembered
_TINY_RMS = torch.finfo(torch.float16).tiny


class GradientNorms:
    """L2 norms of the gradients of one step, copied to the host behind the work that makes them."""

    __slots__ = ("_copies", "_each", "_events", "_owners", "_scale", "scaled", "step")

    def __init__(
        self, step: int, owners: list[tuple[Watched, str, int]], copies: list[Tensor], events: list[Any],
        scale: Tensor | None,
    ) -> None:  # fmt: skip
        self.step = step
        self.scaled = scale is not None  # by a GradScaler, which will look for inf itself
        self._owners = owners
        self._scale = scale
        self._copies, self._events = copies, events
        self._each: list[float] | None = None

    @property
    def each(self) -> list[tuple[Watched, str, int, float]]:
        """(module, parameter, elements, norm) by parameter; the loss scale is taken out. Waits for the copy."""
        if self._each is None:
            for event in self._events:
                event.synchronize()
            scale = 1.0 if self._scale is None else float(self._scale)
            self._each = [value / scale for copy in self._copies for value in copy.tolist()]
            self._copies, self._events, self._scale = [], [], None
        return [(*owner, value) for owner, value in zip(self._owners, self._each, strict=True)]

    @property
    def total(self) -> float:
        """The norm over all parameters."""
        return math.sqrt(sum(value * value for _, _, _, value in self.each))

    def bad(self) -> tuple[Watched, str, float] | None:
        """The last parameter, in the order of the model, whose gradient is not finite: backward met it first."""
        found = [(owner, name, norm) for owner, name, _, norm in self.each if not math.isfinite(norm)]
        return found[-1] if found else None

    def underflow(self) -> tuple[Watched, str] | None:
        """A float16 layer whose gradient is all zero below one whose gradient is so small that it nearly is.

        Zero alone means nothing (a frozen, dead or unused layer has it); zero behind values at float16's end does.
        """
        rows = [row for row in self.each if _is_half(row[0])]
        for i, (owner, name, _, norm) in enumerate(rows):
            if norm == 0.0 and any(0.0 < n < _TINY_RMS * math.sqrt(size) for _, _, size, n in rows[i + 1 :]):
                return owner, name
        return None


class Gradients:
    """The gradient norms of the last steps of a recorder."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._taken: deque[GradientNorms] = deque(maxlen=_STEPS)
        self._pinned: dict[torch.device, Tensor] = {}  # host memory for the copies of the last steps
        self._row = 0

    def of(self, step: int) -> GradientNorms | None:
        return next((norms for norms in reversed(self._taken) if norms.step == step), None)

    def take(self, step: int, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> None:
        """Enqueue the norms of the gradients there are now; once per step. Nothing is read."""
        if self._taken and self._taken[-1].step == step:
            return
        owners = self._weights.parameter_owners()
        grads: list[Any] = [param.grad for param in self._weights.parameters()]
        groups: list[list[Tensor]] = [grads]
        flat = owners
        # The usual case needs no look at each one. A shard must not get here: its norm would be a collective.
        norms = _norms(groups) if set(map(type, grads)) == {Tensor} else None
        if norms is None:
            by_device: dict[torch.device, list[int]] = {}
            for i, grad in enumerate(grads):
                if grad is not None and is_plain(grad):
                    by_device.setdefault(grad.device, []).append(i)
            flat = [owners[i] for group in by_device.values() for i in group]
            norms = _norms([[grads[i] for i in group] for group in by_device.values()]) or []
        if not norms:
            return
        copies = [self._to_host(norm) for norm in norms]
        cuda: Any = torch.cuda
        events = [cuda.current_stream(norm.device).record_event() for norm in norms if norm.is_cuda]
        self._row = (self._row + 1) % _STEPS
        self._taken.append(GradientNorms(step, flat, copies, events, _loss_scale(scaler, optimizer)))

    def _to_host(self, norms: Tensor) -> Tensor:
        """A copy on the host, without waiting. Pinned memory is taken once: asking for it can stop the device."""
        if not norms.is_cuda:
            return norms.cpu()
        pinned = self._pinned.get(norms.device)
        if pinned is None or pinned.shape[1] != norms.numel():
            pinned = torch.empty(_STEPS, norms.numel(), dtype=norms.dtype, pin_memory=True)
            self._pinned[norms.device] = pinned
            self._taken.clear()
        return pinned[self._row].copy_(norms, non_blocking=True)


def _norms(groups: list[list[Tensor]]) -> list[Tensor] | None:
    """A vector of L2 norms per group; None where some gradients are sparse, complex or on another device."""
    try:
        with torch.no_grad():
            return [torch.stack(torch._foreach_norm(group, 2, torch.float32)) for group in groups]
    except (RuntimeError, NotImplementedError):
        return None


def _is_half(watched: Watched) -> bool:
    return any(dtype is torch.float16 for _, dtype in watched.sites)


def _loss_scale(scaler: Any, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
    """The scale that these gradients still carry; None if there is none or unscale_() has taken it out."""
    if scaler is None or not isinstance(getattr(scaler, "_scale", None), Tensor):
        return None
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    return None if stage == "UNSCALED" else scaler._scale.detach().clone()
