"""The loss that a backward starts from: measured for every recorder, as most losses are made outside any module."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_NODES = 200_000  # of a graph that are looked at
_is_compiling = torch.compiler.is_compiling
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def install(recorders: Sequence[DebugUnderflowOverflow], undone_by: list[Callable[[], None]]) -> None:
    """Tell these recorders of the tensors that `backward()` is called on, or `torch.autograd.grad` for a parameter of
    theirs, and of what a GradScaler scales, before it is scaled. What takes each patch away again is put into
    `undone_by` before it is made: Ctrl-C may come between."""
    home: Any = torch.autograd
    backward_before, grad_before, at_work, scaling = home.backward, home.grad, True, threading.local()

    def tell(value: Any, scaled: bool, inputs: Any = None) -> None:
        if not at_work or _is_compiling() or torch._C._current_graph_task_id() != -1:
            return  # in a backward: activation checkpointing has one of its own
        compiler = _set_compiler(None)
        try:
            for recorder in list(recorders):
                if inputs is None or _any_of(inputs, recorder.weights.parameters()):
                    recorder.guard(recorder.values.record_loss, value, scaled)
        finally:
            _set_compiler(compiler)

    @functools.wraps(backward_before)
    def backward(*args: Any, **kwargs: Any) -> Any:
        tell(args[0] if args else kwargs.get("tensors"), False)
        return backward_before(*args, **kwargs)

    @functools.wraps(grad_before)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tuple(inputs) if isinstance(inputs, Iterator) else inputs
        tell(outputs, False, inputs)
        return grad_before(outputs, inputs, *args, **kwargs)

    def with_telling(scale_before: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        @functools.wraps(scale_before)
        def scale(self: Any, outputs: Any) -> Any:
            if _is_compiling() or hasattr(scaling, "now") or not self.is_enabled():
                return scale_before(self, outputs)  # a subclass has told of it, and calls that of its base
            tell(outputs, True)
            scaling.now = True
            try:
                return scale_before(self, outputs)
            finally:
                del scaling.now

        return scale

    def undo() -> None:
        nonlocal at_work
        at_work = False
        if home.backward is backward:  # else somebody has put theirs around it
            home.backward = backward_before
        if home.grad is grad:
            home.grad = grad_before

    undone_by.append(undo)
    home.backward, home.grad = backward, grad
    _patch_scalers(with_telling, undone_by)


def _patch_scalers(
    wrap: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]], undone_by: list[Callable[[], None]]
) -> None:
    """Wrap `scale` of GradScaler and of each subclass that has its own, as that of FSDP, also where it comes later."""
    base: Any = torch.amp.GradScaler
    patched: list[tuple[Any, Any, Any]] = []

    def patch(cls: Any) -> None:
        before = cls.__dict__.get("scale")
        if callable(before):
            ours = wrap(before)
            patched.append((cls, before, ours))
            cls.scale = ours

    def also_later(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        patch(cls)

    hook: Any = classmethod(also_later)

    def undo() -> None:
        if base.__dict__.get("__init_subclass__") is hook:
            del base.__init_subclass__
        for cls, before, ours in patched:
            if cls.__dict__.get("scale") is ours:
                cls.scale = before

    undone_by.append(undo)
    if "__init_subclass__" not in base.__dict__:
        base.__init_subclass__ = hook
    stack = [base]
    while stack:
        patch(stack[-1])
        stack += stack.pop().__subclasses__()


def _any_of(inputs: Any, parameters: Sequence[Tensor]) -> bool:
    """Whether parameters are among what gradients are taken for: those for the data, as penalties and forces take
    them, are of values that are not the loss."""
    ours = {id(parameter) for parameter in parameters}
    given = inputs if isinstance(inputs, Sequence) else [inputs]
    return any(id(tensor) in ours for tensor in given)


def single_values(value: Any) -> list[Tensor]:
    """The losses among what a backward is called on: tensors of one element."""
    tensors = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, (list, tuple)) else []
    return [t for t in tensors if isinstance(t, Tensor) and t.numel() == 1 and not t.is_meta]


def trains_others(loss: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the graph of a loss leads to parameters, and to none of these: it is another model's."""
    ours = {id(parameter) for parameter in parameters}
    stack: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    others = False
    while stack and len(seen) < _NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if id(variable) in ours or "Checkpoint" in type(node).__name__:
            return False  # what is in a checkpoint is in no graph yet
        others = others or variable is not None
        stack += [following for following, _ in node.next_functions]
    return others
