"""What a backward needs to run again: the forward's snapshot, and the gradients of what the root returned."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import leaves, parts
from mldebug.numerics.ops._loss_backward import LossBackward
from mldebug.numerics.ops._source import Line
from mldebug.numerics.replay._checkpoints import refuse_other_checkpoints
from mldebug.numerics.replay._collectives import NotReplayable
from mldebug.numerics.replay._replay import MAX_BYTES, Snapshot

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ring._records import Call

_CALLS = 8  # forwards of one step that are kept: micro-batches
_OUTPUTS = 8  # tensors that a root returns whose gradients are kept


class Kept:
    """One forward whose backward may be run again. Its gradients come by hooks on the tensors it returned."""

    def __init__(self, call: Call, snapshot: Snapshot, output: Any) -> None:
        self.call = call
        self.snapshot = snapshot
        self.grads: dict[str, Tensor] = {}  # as they went into the nodes: after the user's hooks on these outputs
        self._came: dict[str, int] = {}  # the id of each before these
        self._before: dict[str, Tensor] = {}  # those that a hook has changed, as they were
        self.reason = ""
        self.last = torch._C._autograd._get_sequence_nr()  # the number of the first node after the forward
        self.twice = False  # its gradients were made to be differentiated again, and that is not run again
        self._bytes = 0
        self._outputs: list[weakref.ref[Tensor]] = []
        self._handles: list[Any] = []
        for path, leaf in leaves(output, "output"):
            if isinstance(leaf, Tensor) and leaf.requires_grad and len(self._handles) < _OUTPUTS:
                hook: Any = leaf.register_hook
                self._handles.append(hook(_Catch(self, path)))
                if leaf.grad_fn is not None:
                    self._handles.append(leaf.grad_fn.register_prehook(_CatchAfter(self, path, leaf.output_nr)))
                self._outputs.append(weakref.ref(leaf))

    def changed_by_hook(self) -> Line | None:
        """The hook of the user's own on an output of the root that made its gradient bad; None if none did. The line is
        that of the hook if the output is still there."""
        bad = {path for path in self._before.keys() & self.grads.keys() if not _is_finite(self.grads[path])}
        if not any(_is_finite(self._before[path]) for path in bad):
            return None
        for output in (ref() for ref in self._outputs):
            for hook in (output._backward_hooks or {}).values() if output is not None else ():
                if (code := getattr(hook, "__code__", None)) is not None:
                    return Line(code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name))
        return Line("", 0, "")

    def catch_after(self, path: str, grad: Tensor) -> None:
        """The gradient as the node takes it."""
        if path in self.grads and id(grad) != self._came.get(path):
            self._before[path] = self.grads[path]
            self.grads[path] = grad.detach()

    def catch(self, path: str, grad: Tensor) -> None:
        self.twice = self.twice or torch.is_grad_enabled()
        self._bytes += grad.numel() * grad.element_size()
        if self._bytes > MAX_BYTES:
            self.reason = f"the gradients of its outputs take more than {MAX_BYTES >> 20} MB"
            self.grads.clear()
        else:
            self.grads[path] = grad.detach()
            self._came[path] = id(grad)

    def returned_fine(self) -> bool:
        """Whether all that the root returned is still there and finite."""
        alive = [output for ref in self._outputs if (output := ref()) is not None]
        finite = all(bool(torch.isfinite(part).all()) for output in alive for part in parts(output.detach()))
        return finite and len(alive) == len(self._outputs)

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.grads.clear()
        self._before.clear()

    def differentiate(self, output: Any, parameters: list[Tensor], scale: float = 1.0) -> list[Tensor | None]:
        """The vector-Jacobian product of a forward that has just run again, by parameter that requires a gradient.
        `.grad` is left alone. The gradients of its outputs are divided by `scale`."""
        again = {path: leaf for path, leaf in leaves(output, "output") if isinstance(leaf, Tensor)}
        if set(self.grads) - set(again):
            raise NotReplayable("its outputs are others when it runs again")
        paths = [path for path in self.grads if not _leads_to(again[path], [again[p] for p in self.grads if p != path])]
        wanted = [p for p in parameters if p.requires_grad]
        grads = [self.grads[path] if scale == 1.0 else self.grads[path] / scale for path in paths]
        outputs = [again[path] for path in paths]
        refuse_other_checkpoints(outputs)
        made = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        return list(made)


class Backwards:
    """The forwards of the current step whose backward may be run again."""

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._kept: deque[Kept] = deque(maxlen=_CALLS)
        self.after_model = LossBackward(recorder)

    def keep(self, call: Call, output: Any) -> None:
        """A root forward with gradients has returned."""
        if call.snapshot is not None and call.grad:
            if len(self._kept) == _CALLS:
                self._kept[0].release()
            self._kept.append(Kept(call, call.snapshot, output))

    def ran(self) -> list[Kept]:
        """Those whose backward has run."""
        return [kept for kept in self._kept if kept.grads or kept.reason]

    def of_batch(self, batch: int) -> Kept | None:
        return next((kept for kept in self._kept if kept.call.batch == batch), None)

    def nodes(self) -> list[tuple[int, int]]:
        """The numbers of the nodes that each forward of this step has made: the first, and the first after it."""
        return [(kept.call.node, kept.last) for kept in self._kept]

    def last(self) -> Kept | None:
        return self._kept[-1] if self._kept else None

    def restore_buffers(self) -> None:
        """Give the buffers that the forwards of this step changed their values from before."""
        for kept in reversed(self._kept):
            kept.snapshot.restore_buffers()

    def clear(self) -> None:
        while self._kept:
            self._kept.pop().release()
        self.after_model.clear()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


class _Catch:
    """The hook on an output. torch.save would warn of one that does not say that it need not be saved."""

    __torch_unserializable__ = True
    __slots__ = ("_kept", "_path")

    def __init__(self, kept: Kept, path: str) -> None:
        self._kept, self._path = kept, path

    def __call__(self, grad: Tensor | None) -> None:
        if grad is None:  # of a compiled graph, for an output without a gradient
            return
        try:
            self._kept.catch(self._path, grad)
        except Exception as error:  # nothing of ours may end somebody's backward
            self._kept.reason = f"the gradient of {self._path} could not be kept ({type(error).__name__}: {error})"


class _CatchAfter(_Catch):
    """The hook on the node of an output: it runs after all hooks on the output."""

    __slots__ = ("_index",)

    def __init__(self, kept: Kept, path: str, index: int) -> None:
        super().__init__(kept, path)
        self._index = index

    def __call__(self, grads: Any) -> None:
        grad = grads[self._index]
        if grad is not None:
            try:
                self._kept.catch_after(self._path, grad)
            except Exception as error:  # nothing of ours may end somebody's backward
                self._kept.reason = f"the gradient of {self._path} could not be kept ({type(error).__name__}: {error})"


def _leads_to(tensor: Tensor, others: list[Tensor]) -> bool:
    """Whether another output was computed from this one: its gradient is then part of theirs, and counts once."""
    target = tensor.grad_fn
    stack: list[Any] = [other.grad_fn for other in others if other.grad_fn is not target]
    seen: set[Any] = set()
    while stack and len(seen) < 200_000:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node is target:
            return True
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return False
