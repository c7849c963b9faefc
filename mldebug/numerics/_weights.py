"""Parameters and buffers: measured once per step in a batch; gradient norms before each optimizer step."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from mldebug.numerics._records import Site, Watched
from mldebug.numerics._tensors import is_plain, parts

if TYPE_CHECKING:
    from mldebug.numerics._memory import Memory


class GradientNorms:
    """L2 norms of the gradients of one optimizer step, kept on their devices and read when somebody asks."""

    def __init__(self, step: int, names: list[str], norms: list[Tensor], scale: Tensor | None) -> None:
        self.step = step
        self._names, self._norms, self._scale = names, norms, scale
        self._each: dict[str, float] | None = None

    @property
    def each(self) -> dict[str, float]:
        """Norm by parameter name, the loss scale taken out. Waits for the device the first time."""
        if self._each is None:
            scale = 1.0 if self._scale is None else float(self._scale)
            values = torch.stack([norm.double().cpu() for norm in self._norms]).tolist()
            self._each = {name: value / scale for name, value in zip(self._names, values, strict=True)}
            self._norms, self._scale = [], None
        return self._each

    @property
    def total(self) -> float:
        """The norm over all parameters."""
        return math.sqrt(sum(value * value for value in self.each.values()))


class Weights:
    """The parameters and buffers of the watched modules. Holds none of them alive."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._owners: dict[int, tuple[Watched, weakref.ref[nn.Module]]] = {}
        self._matches: dict[int, bool] = {}  # id(optimizer) -> whether it holds one of our parameters
        self._aside: dict[int, weakref.ref[Tensor]] = {}  # known to be bad: not measured again
        self.bad_buffers: dict[str, str] = {}  # bad before the first forward, name -> nan or inf
        self.due = True  # to be measured at the next root forward
        self.passes = 0
        self.gradients: deque[GradientNorms] = deque(maxlen=256)

    def add(self, watched: Watched, module: nn.Module) -> None:
        self._owners[id(module)] = (watched, weakref.ref(module))
        self._matches.clear()

    def modules(self) -> list[nn.Module]:
        return [module for _, ref in self._owners.values() if (module := ref()) is not None]

    def watched(self) -> list[Watched]:
        return [watched for watched, _ in self._owners.values()]

    def parameters(self) -> list[Tensor]:
        return list({id(p): p for m in self.modules() for p in m._parameters.values() if p is not None}.values())

    def owns(self, optimizer: torch.optim.Optimizer, alone: bool) -> bool:
        """Whether this optimizer steps the watched modules.

        It does if it holds one of their parameters. Where no optimizer does (DeepSpeed and FSDP step flat copies),
        a recorder that is `alone` takes any optimizer for its own.
        """
        key = id(optimizer)
        if key not in self._matches:
            ours = {id(p) for p in self.parameters()}
            self._matches[key] = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
            weakref.finalize(optimizer, self._matches.pop, key, None).atexit = False
        return self._matches[key] or (alone and not any(self._matches.values()))

    def measure(self) -> tuple[int, int]:
        """Record all parameters and float buffers; returns their range of record numbers."""
        self.due = False
        self.passes += 1
        sites: list[Site] = []
        tensors: list[Tensor] = []
        for watched, name, tensor, role in self._tensors():
            aside = self._aside.get(id(tensor))
            if watched.muted or (aside is not None and aside() is tensor):
                continue
            plain = is_plain(tensor) and tensor.numel() and not tensor.is_meta
            for piece in [tensor] if plain else parts(tensor):
                sites.append(watched.site(name, tensor.dtype, role))
                tensors.append(piece)
        start = self._memory.sequence
        self._memory.record_all(sites, tensors)
        return start, self._memory.sequence

    def first_look(self, start: int, end: int) -> bool:
        """The verdict on what is there before the first forward; True if a parameter is bad. Waits for the device.

        A buffer that was never good may be scratch space (`torch.empty`): it is set aside, and counts only if NaN
        follows from it.
        """
        self._memory.publish(start, end)
        seen = self._memory.flags(wait=True)
        if seen is None or seen[0] is None:
            return False
        bad = [
            (self._memory.site(number), stats)
            for number, stats in zip(range(start, end), self._memory.stats(range(start, end)), strict=True)
            if stats.bad
        ]
        for site, stats in bad:
            if site.role == "buffer":
                self.bad_buffers[full_name(site)] = "nan" if stats.has_nan else "inf"
                self.set_aside(full_name(site))
        if any(site.role == "parameter" for site, _ in bad):
            return True
        self._memory.clear_flags()
        return False

    def set_aside(self, name: str) -> None:
        """Do not report this parameter or buffer again: it is known to be bad."""
        for watched, key, tensor, _ in self._tensors():
            if join_name(watched.name, key) == name:
                self._aside[id(tensor)] = weakref.ref(tensor)

    def read_gradients(self, step: int, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Enqueue the norms of the gradients that an optimizer is about to use; once per step, nothing is read."""
        if self.gradients and self.gradients[-1].step == step:
            return
        names, grads = [], []
        for watched, name, tensor, role in self._tensors():
            grad = tensor.grad if role == "parameter" else None
            if grad is not None and is_plain(grad) and grad.numel():
                names.append(join_name(watched.name, name))
                grads.append(grad.detach())
        if grads:
            norms = list(torch._foreach_norm(grads, 2))
            self.gradients.append(GradientNorms(step, names, norms, _loss_scale(scaler, optimizer)))

    def buffers(self) -> list[Tensor]:
        return [buffer for module in self.modules() for buffer in module._buffers.values() if buffer is not None]

    def buffer_versions(self) -> dict[int, int]:
        return {id(buffer): buffer._version for buffer in self.buffers() if not buffer.is_inference()}

    def _tensors(self) -> Iterator[tuple[Watched, str, Tensor, Literal["parameter", "buffer"]]]:
        seen: set[int] = set()
        for watched, ref in self._owners.values():
            module = ref()
            if module is None:
                continue
            for name, tensor in module._parameters.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield watched, name, tensor, "parameter"
            for name, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield watched, name, tensor, "buffer"


def join_name(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def full_name(site: Site) -> str:
    """The dotted name of a parameter or buffer."""
    return join_name(site.module or "", site.path)


def _loss_scale(scaler: Any, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The scale that these gradients still carry; None if there is none or unscale_() has taken it out."""
    if scaler is None or not isinstance(getattr(scaler, "_scale", None), Tensor):
        return None
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    return None if stage == "UNSCALED" else scaler._scale.detach().clone()
