"""A -inf that the model computed and returned: a log of zero, say. By itself no event, it is one once it has harmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._masks import MinusInfinity
from mldebug.numerics._tensors import leaves
from mldebug.numerics.replay._found import Found

if TYPE_CHECKING:
    from mldebug.numerics._frames import Frames
    from mldebug.numerics.replay._judge import Judge
    from mldebug.numerics.ring._records import Call, Watched


def returned_infinity(judge: Judge, call: Call, harms: Callable[[Any], bool]) -> Found | None:
    """The event of a -inf that this forward computed and returned, if it `harms`; by running it again.

    `harms` is asked with what the forward returns.
    """
    if call.snapshot is None or call.snapshot.needs_all:
        return None
    again = judge.reruns.new_frames()
    again.begin_batch(call.batch)
    bad: list[bool] = []
    with MinusInfinity(again) as watch:
        judge.reruns.run(call, again, then=lambda output: bad.append(harms(output)))
    made = next((mask for mask in again.masks if mask.owner is watch.origin), None) if any(bad) else None
    if made is None:
        return None
    found = judge.of_mask(made, again, call)
    operations, _ = judge.reruns.operations(call, infinite=True)
    found = found if operations is None else judge.refine(found, operations)
    return replace(found, event=replace(found.event, again="shown"))


def computed_infinity(judge: Judge, call: Call) -> Watched | None:
    """The module that first computed a -inf, by a replay under a look at every operation."""
    again: Frames = judge.reruns.new_frames()
    watch = MinusInfinity(again)
    with watch:
        judge.reruns.run(call, again)
    return watch.origin


def comes_back_bad(output: Any, grads: Mapping[str, Tensor]) -> bool:
    """Whether one of the gradients of `output`, by path, is bad where it is -inf: the loss made it of that."""
    return _any_infinity(output, grads, lambda grad: ~torch.isfinite(grad))


def reaches_loss(output: Any, grads: Mapping[str, Tensor] | None) -> bool:
    """Whether `output` has -inf where its gradient, by path, is not zero: the loss was made of that. Where gradients
    were not kept (None), whether it has any."""
    if grads is None:
        found = [leaf for _, leaf in leaves(output, "output") if isinstance(leaf, Tensor)]
        return any(bool(torch.isneginf(leaf).any()) for leaf in found)
    return _any_infinity(output, grads, lambda grad: grad != 0)


def _any_infinity(output: Any, grads: Mapping[str, Tensor], where: Callable[[Tensor], Tensor]) -> bool:
    for path, leaf in leaves(output, "output"):
        grad = grads.get(path)
        if not isinstance(leaf, Tensor) or grad is None or leaf.shape != grad.shape or not leaf.is_floating_point():
            continue
        if bool((torch.isneginf(leaf) & where(grad)).any()):
            return True
    return False
