"""Updates that round away: weights in half precision that stay as they are, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mldebug.numerics._tensors import is_plain

if TYPE_CHECKING:
    from mldebug.numerics._weights import Weights

_AT = (
    32,
    128,
    1024,
    8192,
)  # looks at a run, in optimizer steps; a warm-up begins with updates that are meant to be tiny
_SHARE = 0.05  # of the weights that have a gradient: if fewer change in each of two looks and between them, it is said
_WEIGHTS, _ELEMENTS = 256, 512  # of a model, and of each of them, that are looked at
_HALF = (torch.float16, torch.bfloat16)


@dataclass
class _Look:
    """A sample of the weights before a step, and which of it has a gradient."""

    step: int
    params: list[Tensor]
    before: list[Tensor]
    trained: list[Tensor]
    earlier: list[Tensor]  # the same sample at the look before this one


class Rounding:
    """Compares a sample of the weights of an optimizer with what one step makes of it, a few times in a run.

    A bfloat16 has 8 significant bits: what is less than 1/256 of a weight may be lost when it is added. Only weights
    that the optimizer holds itself count, and has no copy of in its state, so that one with copies in float32 is
    passed over. So is one that keeps its copies where nobody sees them: few of its weights change in one step, but
    many from one look to the next.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._look: _Look | None = None
        self._few = False  # whether few changed at the last look
        self._earlier: dict[int, Tensor] = {}  # the sample of each weight at the last look
        self._waiting: tuple[int, torch.dtype, list[Tensor]] | None = None  # of a look whose numbers are on a device
        self._next = 0

    def before(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """An optimizer is about to step."""
        if self._next >= len(_AT) or step < _AT[self._next]:
            return
        self._next = next((i for i, at in enumerate(_AT) if at > step), len(_AT))
        look = _Look(step, [], [], [], [])
        with torch.no_grad():
            for param in self._halves(optimizer):
                grad = param.grad
                if grad is not None and is_plain(grad) and grad.shape == param.shape:
                    look.params.append(param)
                    look.before.append(_sample(param).clone())
                    look.trained.append((_sample(grad) != 0) & ~_has_copy(param, optimizer))
                    look.earlier.append(self._earlier.get(id(param), look.before[-1]))
        self._earlier = {id(param): sample for param, sample in zip(look.params, look.before, strict=True)}
        self._look = look if look.params else None

    def after(self, step: int) -> str:
        """A step is over: a note, or "". What a look saw on a device is read two steps later, when it has arrived."""
        look, self._look = self._look, None
        if look is None or look.step != step:
            return self._read() if self._waiting is not None and step > self._waiting[0] + 1 else ""
        with torch.no_grad():
            now = [_sample(param) for param in look.params]
            counts = [
                torch.stack([((new != old) & trained).sum(), ((old != earlier) & trained).sum(), trained.sum()])
                for new, old, earlier, trained in zip(now, look.before, look.earlier, look.trained, strict=True)
            ]
        self._waiting = step, look.params[0].dtype, counts
        return "" if counts[0].is_cuda else self._read()

    def _read(self) -> str:
        if self._waiting is None:
            return ""
        (step, dtype, counts), self._waiting = self._waiting, None
        changed, moved, trained = (sum(numbers) for numbers in zip(*(count.tolist() for count in counts), strict=True))
        if not trained:
            return ""
        share, before = changed / trained, self._few
        self._few = share < _SHARE
        if not before or not self._few or moved / trained >= _SHARE:
            return ""
        self._next, self._earlier = len(_AT), {}
        name, part = str(dtype).removeprefix("torch."), 2 / torch.finfo(dtype).eps
        return (
            f"updates round away: of the {name} weights that have a gradient {share:.1%} changed in step {step}; what "
            f"is less than about 1/{part:.0f} of a weight is lost there when it is added. Keep the weights in float32 "
            "(under autocast), or raise the learning rate"
        )

    def _halves(self, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
        """Some weights of the model that this optimizer holds, in half precision, evenly from the first to the last."""
        held = {id(p) for group in optimizer.param_groups if _moves(group.get("lr")) for p in group["params"]}
        ours = [p for p in self._weights.parameters() if p.dtype in _HALF and id(p) in held]
        ours = [p for p in ours if is_plain(p) and p.is_contiguous() and p.numel()]
        yield from ours[:: max(len(ours) // _WEIGHTS, 1)]


def _moves(rate: object) -> bool:
    if isinstance(rate, Tensor):
        return not rate.is_cpu or bool((rate > 0).any())  # a device is not waited for
    return not isinstance(rate, (int, float)) or rate > 0


def _has_copy(param: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Whether the optimizer's state has this weight in a wider dtype, where small updates add up. Nothing is read."""
    state, ours = optimizer.state.get(param), _sample(param)
    found = torch.zeros((), dtype=torch.bool, device=param.device)
    for kept in state.values() if isinstance(state, dict) else ():
        if not isinstance(kept, Tensor) or not is_plain(kept) or not kept.is_floating_point():
            continue
        if kept.shape == param.shape and kept.device == param.device and kept.itemsize > param.itemsize:
            found = found | (_sample(kept).to(param.dtype) == ours).all()
    return found


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // _ELEMENTS, 1)]
