"""Gradient norms before each optimizer step: their history, and gradients that underflow to zero."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import is_plain
from mldebug.numerics.ring._records import Watched
from mldebug.numerics.ring._triton_norms import TritonNorms
from mldebug.numerics.ring._triton_ring import TritonRing

if TYPE_CHECKING:
    from mldebug.numerics._weights import Weights

# Gradients this small on average lie where float16 has only subnormals: below them everything rounds to zero.
_STEPS = 256  # steps that are remembered
_TINY_RMS = torch.finfo(torch.float16).tiny


class GradientNorms:
    """L2 norms of the gradients of one step, copied to the host behind the work that makes them."""

    __slots__ = ("_copies", "_each", "_events", "_found", "_loss_scale", "_owners", "_state", "scaled", "step")

    def __init__(
        self, step: int, owners: list[tuple[Watched, str, int]], copies: list[Tensor], events: list[Any],
        state: str,
    ) -> None:  # fmt: skip
        self.step = step
        self.scaled = bool(state)  # by a GradScaler, which looks for inf itself and skips the step
        self._owners = owners
        self._state = state  # "scaled", or "unscaled" after unscale_(): the first copy ends with scale and inf found
        self._loss_scale = 1.0
        self._found = True
        self._copies, self._events = copies, events
        self._each: list[float] | None = None

    @property
    def each(self) -> list[tuple[Watched, str, int, float]]:
        """(module, parameter, elements, norm) by parameter; the loss scale is taken out. Waits for the copy."""
        return [(*owner, value) for owner, value in zip(self._owners, self.values, strict=True)]

    @property
    def values(self) -> list[float]:
        """The norms alone."""
        if self._each is None:
            for event in self._events:
                event.synchronize()
            copies = [copy.tolist() for copy in self._copies]
            if self._state:
                found = copies[0].pop()
                self._loss_scale, self._found = copies[0].pop(), self._state == "scaled" or found > 0
            scale = self._loss_scale if self._state == "scaled" else 1.0
            self._each = [value / scale for copy in copies for value in copy]
            self._copies, self._events = [], []
        return self._each

    @property
    def loss_scale(self) -> float:
        """The scale that the loss of this step was multiplied by. Waits for the copy."""
        return self._loss_scale if self.values is not None else 1.0

    @property
    def skipped(self) -> bool:
        """Whether GradScaler skips this step if gradients are not finite: not if they became so after unscale_()."""
        return self.scaled and self.values is not None and self._found

    @property
    def owners(self) -> list[tuple[Watched, str, int]]:
        """(module, parameter, elements) of each of `values`."""
        return self._owners

    @property
    def total(self) -> float:
        """The norm over all parameters."""
        return math.nan if any(map(math.isnan, self.values)) else math.hypot(*self.values)

    def bad(self) -> tuple[Watched, str, float] | None:
        """The last parameter, in the order of the model, whose gradient is not finite: backward met it first.

        A norm is not finite only where an element of the gradient is not: none is named for its size.
        """
        found = [(owner, name, norm) for owner, name, _, norm in self.each if not math.isfinite(norm)]
        return found[-1] if found else None

    def underflow(self) -> tuple[Watched, str] | None:
        """A float16 layer whose gradient is all zero below one whose gradient is so small that it nearly is.

        Zero alone means nothing (a frozen, dead or unused layer has it); zero behind values at float16's end does.
        """
        if not any(owner.half for owner, _, _ in self._owners):
            return None
        rows = [row for row in self.each if row[0].half]
        for i, (owner, name, _, norm) in enumerate(rows):
            # The bias of an attention's keys has no gradient by its nature: a softmax does not see it.
            if (
                norm == 0.0
                and name != "bias"
                and any(0.0 < n < _TINY_RMS * math.sqrt(size) for _, _, size, n in rows[i + 1 :])
            ):
                return owner, name
        return None


class Gradients:
    """The gradient norms of the last steps of a recorder."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._taken: deque[GradientNorms] = deque(maxlen=_STEPS)
        self._pinned: dict[torch.device, Tensor] = {}  # host memory for the copies of the last steps
        self._triton: dict[torch.device, TritonNorms | None] = {}
        self._row = 0
        self._batches = -1  # forwards at the last time

    def of(self, step: int) -> GradientNorms | None:
        return next((norms for norms in reversed(self._taken) if norms.step == step), None)

    def not_finite(self) -> list[GradientNorms]:
        """Of the steps that are remembered, those whose norm is nan or inf. Waits for the copies."""
        return [norms for norms in self._taken if not math.isfinite(norms.total)]

    def taken(self) -> list[GradientNorms]:
        """Those of the steps that are remembered, oldest first."""
        return list(self._taken)

    def take(self, step: int, batches: int, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> bool:
        """Enqueue the norms of the gradients there are now, once per step and count of forwards; whether that was done.
        Nothing is read."""
        if self._taken and self._taken[-1].step == step and self._batches == batches:
            return False
        owners = self._weights.parameter_owners()
        grads: list[Any] = [param.grad for param in self._weights.parameters()]
        groups: list[list[Tensor]] = [grads]
        flat = owners
        # The usual case needs no look at each one. A shard must not get here: its norm would be a collective.
        norms = self._norms(groups) if set(map(type, grads)) == {Tensor} else None
        if norms is None:
            by_device: dict[torch.device, list[int]] = {}
            for i, grad in enumerate(grads):
                if grad is not None and is_plain(grad):
                    by_device.setdefault(grad.device, []).append(i)
            flat = [owners[i] for group in by_device.values() for i in group]
            norms = self._norms([[grads[i] for i in group] for group in by_device.values()]) or []
        if not norms:
            return False
        self._batches = batches
        state, values = _scaler_state(scaler, optimizer)
        if values:
            with torch.no_grad():
                norms[0] = torch.cat([norms[0], *(value.to(norms[0]).reshape(1) for value in values)])
        copies = [self._to_host(norm) for norm in norms]
        cuda: Any = torch.cuda
        events = [cuda.current_stream(norm.device).record_event() for norm in norms if norm.is_cuda]
        self._row = (self._row + 1) % _STEPS
        self._taken.append(GradientNorms(step, flat, copies, events, state))
        return True

    def _norms(self, groups: list[list[Tensor]]) -> list[Tensor] | None:
        """A vector of L2 norms per group; None where some gradients are sparse, complex or on another device."""
        try:
            with torch.no_grad():
                return [self._fast_norms(g) if TritonNorms.takes(g) else _torch_norms(g) for g in groups]
        except (RuntimeError, NotImplementedError):
            return None

    def _fast_norms(self, grads: list[Tensor]) -> Tensor:
        device = grads[0].device
        if device not in self._triton:
            self._triton[device] = TritonNorms(device) if TritonRing.available(device) else None
        fast = self._triton[device]
        try:
            return _torch_norms(grads) if fast is None else fast.of(grads)
        except Exception:  # Triton cannot compile here; the ring of the activations has said so
            self._triton[device] = None
            return _torch_norms(grads)

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


def _torch_norms(grads: list[Tensor]) -> Tensor:
    """The L2 norm of each gradient as float64 (float32 on a device that has no float64): not finite only where an
    element is not finite. Waits for nothing but a CPU."""
    double = any(grad.dtype is torch.float64 for grad in grads)
    if grads[0].is_cpu:
        # float32 is three times as fast here; a result out of its range is taken again.
        norms = torch.stack(torch._foreach_norm(grads, 2, torch.float64 if double else torch.float32)).double()
        for i in torch.nonzero(~torch.isfinite(norms)).flatten().tolist():
            norms[i] = _wide_norm(grads[i])
        return norms
    wide = torch.float32 if grads[0].device.type == "mps" else torch.float64
    norms = torch.stack(torch._foreach_norm(grads, 2, wide))
    if double or wide is torch.float32:
        largest = torch.stack(torch._foreach_norm(grads, math.inf))
        norms = torch.where(torch.isfinite(largest), norms.clamp(max=torch.finfo(wide).max), norms)
    return norms


def _wide_norm(grad: Tensor) -> float:
    largest = float(grad.abs().max())
    if not 0 < largest < math.inf:
        return largest
    return min(largest * float(torch.linalg.vector_norm(grad.double() / largest)), torch.finfo(torch.float64).max)


def _scaler_state(scaler: Any, optimizer: torch.optim.Optimizer | None) -> tuple[str, list[Tensor]]:
    """("scaled" or, after unscale_(), "unscaled", [the loss scale, what unscale_() found]); "" without a scaler that is
    at work. Reads nothing."""
    if scaler is None or not scaler.is_enabled() or not isinstance(getattr(scaler, "_scale", None), Tensor):
        return "", []
    state, scale = scaler._per_optimizer_states[id(optimizer)], scaler._scale.detach()
    if state["stage"].name != "UNSCALED":
        return "scaled", [scale, scale]
    found = [value.detach().to(scale.device).sum() for value in state["found_inf_per_device"].values()]
    return "unscaled", [scale, sum(found, torch.zeros_like(scale))]
