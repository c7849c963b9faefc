"""How many elements of float16 gradients are zero that need not be: a backward that runs again with a larger loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mldebug.numerics._weights import join_name

if TYPE_CHECKING:
    from mldebug.numerics._weights import Weights
    from mldebug.numerics.replay._backward import Kept
    from mldebug.numerics.replay._judge import Judge

_LARGER = 1024.0  # times the loss: exact in any binary dtype
_SHARE = 0.1  # of all elements that were looked at, from which it is said
_AT = (2, 32, 512, 8192)  # looks at a run, in optimizer steps: each is two forwards and two backwards


class Underflow:
    """Looks at float16 models a few times in a run.

    bfloat16 has the exponents of float32, and a gradient that underflows there would in float32 too. A gradient is
    linear in the loss: what is zero, and is not with the loss multiplied by 1024, has underflowed. So zeros of dead
    units, of unused embeddings and of frozen layers do not count.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._done: set[int] = set()

    def look(self, judge: Judge, ran: list[Kept], step: int) -> str:
        """A note, or "". `ran` are the forwards of this step that can be run again."""
        due = [at for at in _AT if at <= step]
        owners = self._weights.parameter_owners()
        if not due or due[-1] in self._done or not ran or not any(owner.half for owner, _, _ in owners):
            return ""
        self._done.update(due)
        as_it_is = judge.reruns.gradients_again(ran[0], 1.0)
        larger = judge.reruns.gradients_again(ran[0], 1.0 / _LARGER) if as_it_is else []
        trained = [
            owner for owner, param in zip(owners, self._weights.parameters(), strict=True) if param.requires_grad
        ]
        lost: list[tuple[float, str]] = []
        gone = total = 0
        for (owner, name, _), grad, other in zip(trained, as_it_is, larger, strict=bool(larger)):
            if grad is None or other is None or not owner.half:
                continue
            count = int(((grad == 0) & (other != 0) & torch.isfinite(other)).sum())
            gone, total = gone + count, total + grad.numel()
            lost.append((count / grad.numel(), join_name(owner.name, name)))
        if not total or gone / total < _SHARE:
            return ""
        share, worst = max(lost)
        return (
            f"underflow: {gone / total:.0%} of the gradient elements of float16 modules are zero and would not be if "
            f"the loss were {_LARGER:.0f} times as large ({worst}: {share:.0%}); scale the loss (torch.amp.GradScaler) "
            "or train in bfloat16"
        )
