"""Which operation of the code after the model makes a bad gradient of good ones: seen while its backward runs, as the
graph keeps nothing of it afterwards."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics import _hub
from mldebug.numerics.ops._op_names import words
from mldebug.numerics.ops._origins import FINE, Origin, state_of

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_NODES = 256  # of a graph that are looked at
_WATCHED = 64  # of these that are hooked
_SIGN = 1 << 63  # AccumulateGrad has the largest number there is
# What these hand on is no worse than what they are given, or bad only where float16 ends: views, copies, sums, means,
# and the usual losses, whose gradients are as large as the logits. To look at them would cost and show nothing.
_HARMLESS = words(
    """Accumulate Add Alias AsStrided AvgPool2D BinaryCrossEntropyWithLogits Cat Chunk Clone Detach Diagonal Dropout
    Embedding Expand Flip Gather HuberLoss Index IndexSelect L1Loss LogSigmoid LogSoftmax MaskedFill Mean MseLoss
    NativeDropout Neg NllLoss NllLoss2D Permute Relu Repeat Reshape ReshapeAlias Select Slice SmoothL1Loss Softmax
    Split SplitWithSizes Squeeze Stack Sub Sum T ToCopy Transpose Unbind Unsafe UnsafeSplit UnsafeView Unsqueeze View
    Where"""
)
# These must not run twice: they run a forward, change other nodes, or belong to a wrapper around the model.
_NEVER = ("Checkpoint", "CopySlices", "Compiled", "DDP", "Hook", "FSDP", "Graph")


class LossBackward:
    """The nodes between the loss and the model in the backwards of one step."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self.recorder = recorder
        self._nodes: list[Any] = []  # held here, and not by their hooks: a node that holds itself is never freed
        self.origin: Origin | None = None  # the first that made something bad

    def watch(self, losses: Iterable[Tensor], models: Sequence[tuple[int, int]]) -> None:
        """A backward is about to begin. `models` are the numbers of the nodes that each forward has made, in order: the
        first, and the first after it. All others from the end of the first forward on are those of the code around."""
        after = models[0][1]
        self._nodes.clear()  # also for the hooks of a graph that is still there: each watch has a list of its own
        self._nodes = nodes = list[Any]()
        stack, seen = [loss.grad_fn for loss in losses], set[Any]()
        while stack and len(seen) < _NODES and len(nodes) < _WATCHED:
            node = stack.pop()
            if node is None or node in seen or not after <= (number := node._sequence_nr()) < _SIGN:
                continue
            if any(first <= number < end for first, end in models):
                continue
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            if _counts(node.name()):
                node.register_hook(_Ran(self, nodes, len(nodes)))
                nodes.append(node)

    def clear(self) -> None:
        self._nodes.clear()
        self.origin = None

    def ran(self, node: Any, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        """A node has run: what it made of the gradients that it was given."""
        if self.origin is None and _hub.replaying is None:
            with torch.no_grad():
                if _bad(made) and not _bad(given):
                    self.origin = self._again(node, given)

    def _again(self, node: Any, given: Sequence[Tensor | None]) -> Origin | None:
        """What in the formula of a node makes the bad gradient: it runs once more, under a look at every operation."""
        from mldebug.numerics.ops._ops import OpWatch

        own = hasattr(node, "apply")  # a torch.autograd.Function of somebody's own
        if own and torch.distributed.is_available() and torch.distributed.is_initialized():
            return None  # it may hold a collective, and the other ranks do not run theirs again
        watch = OpWatch(self.recorder, replay=True)
        watch.begin_step(self.recorder.step)
        before, _hub.replaying = _hub.replaying, (self.recorder, threading.get_ident())
        try:
            with watch:
                watch.returned(node.apply(*given) if own else node(*given))
        finally:
            _hub.replaying = before
        origin = watch.verdict()
        if origin is not None and not origin.node:  # its operations ran as those of a forward do
            origin.phase, origin.node, origin.owner = "backward", node.name(), None
            origin.facts |= {"a gradient"}
        return origin


class _Ran:
    """The hook on a node."""

    __slots__ = ("_nodes", "_number", "_of")

    def __init__(self, of: LossBackward, nodes: list[Any], number: int) -> None:
        self._of, self._nodes, self._number = of, nodes, number

    def __call__(self, made: Any, given: Any) -> None:
        if self._number < len(self._nodes) and not all(_is_surely_fine(tensor) for tensor in made):
            self._of.recorder.guard(self._of.ran, self._nodes[self._number], made, given)


def _bad(tensors: Sequence[Tensor | None]) -> bool:
    return any(isinstance(tensor, Tensor) and state_of(tensor) > FINE for tensor in tensors)


def _is_surely_fine(tensor: Tensor | None) -> bool:
    """A sum is the cheapest look there is: where it is finite all is. It may overflow by itself."""
    if tensor is None:
        return True
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point()
    return plain and math.isfinite(tensor.detach().sum().item())


@functools.lru_cache(maxsize=4096)
def _counts(name: str) -> bool:
    """Whether a node of this name is looked at."""
    kind = name.rstrip("0123456789").removesuffix("Backward").rpartition("::")[2]
    return kind not in _HARMLESS and not any(word in name for word in _NEVER)
