"""Gradients of what modules return, measured in backward by hooks on the tensors: where a bad gradient first shows."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.numerics._tensors import is_plain
from mldebug.numerics.ring._records import Watched

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

_is_compiling = torch.compiler.is_compiling
_STEPS = 64  # steps whose records are remembered


class OutputGradients:
    """The records of the gradients of module outputs, step by step.

    Hooks are on tensors and not on modules: a full backward hook wraps what goes in and out of a module, which forbids
    changing it in place. The records share the numbers, and so the order, of those of the forward; a bad one alarms
    but is no event by itself, since GradScaler may be about to skip the step.
    """

    def __init__(self, recorder: DebugUnderflowOverflow) -> None:
        self._recorder = recorder
        self._hooks: dict[tuple[int, str], _Hook] = {}
        self._first = self._end = -1  # records of the step under way
        self._batch = 0
        self._steps: deque[tuple[int, int, range]] = deque(maxlen=_STEPS)  # step, batch, record numbers

    def watch(self, watched: Watched, output: Any) -> None:
        """Hook what a module has returned. The hot path: for each module of each forward."""
        if type(output) is Tensor:
            if output.requires_grad:
                output.register_hook(self._hook(watched, "output"))  # type: ignore[no-untyped-call,unused-ignore]
        elif type(output) is tuple:
            for i, item in enumerate(output):
                if type(item) is Tensor and item.requires_grad:
                    item.register_hook(self._hook(watched, f"output[{i}]"))  # type: ignore[no-untyped-call,unused-ignore]

    def backward_begins(self) -> None:
        """Say once where no gradient will be seen."""
        autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(autograd, "compiled_autograd_enabled", False):
            self._recorder.remark(
                "gradients of module outputs are not measured under compiled autograd: it traces the hooks that would"
            )

    def record(self, watched: Watched, path: str, grad: Tensor) -> None:
        """Measure one gradient, in backward."""
        if self._recorder.graphs.capturing:
            return
        memory = self._recorder.memory
        if self._first < 0:
            self._first, self._batch = memory.sequence, max(self._recorder.forwards.batches - 1, 0)
        memory.record(watched.site(f"{path} gradient", grad.dtype, "gradient"), grad)
        self._end = memory.sequence

    def end_step(self, step: int) -> None:
        """The optimizer is about to step: send what was recorded on its way to the host."""
        if self._first < 0:
            return
        numbers = range(self._first, self._end)
        self._first = -1
        self._recorder.memory.publish(numbers.start, numbers.stop)
        self._steps.append((step, self._batch, numbers))

    def clear(self) -> None:
        self._hooks.clear()

    def numbers(self, step: int) -> list[int]:
        """The records of a step that are still held, in the order of backward."""
        return [n for known, _, numbers in self._steps if known == step for n in self._held(numbers)]

    def by_batch(self) -> list[tuple[int, list[int]]]:
        """(batch, records) of the steps that are remembered."""
        return [(batch, held) for _, batch, numbers in self._steps if (held := self._held(numbers))]

    def origin(self, step: int) -> tuple[Watched | None, str] | None:
        """(module whose backward sent back the first bad gradient, "nan" or "inf") in a step; the module is None where
        the gradient that reached the model was bad already. None if all were fine.

        Backward comes by the modules in turn: the last one whose own output had a finite gradient is the one that made
        the next one's bad, or the code between the two did.
        """
        memory = self._recorder.memory
        numbers = self.numbers(step)
        bad = set(memory.bad(numbers))
        first = next((n for n in numbers if n in bad), None)
        if first is None:
            return None
        kind = "nan" if memory.stats([first])[0].has_nan else "inf"
        before = [n for n in numbers if n < first]
        return (memory.site(before[-1]).owner if before else None), kind

    def _hook(self, watched: Watched, path: str) -> _Hook:
        key = id(watched), path
        hook = self._hooks.get(key)
        if hook is None:
            hook = self._hooks[key] = _Hook(self, watched, path)
        return hook

    def _held(self, numbers: range) -> list[int]:
        memory = self._recorder.memory
        return [n for n in numbers if memory.holds(n) and memory.site(n).role == "gradient"]


class _Hook:
    """A hook on an output. torch.save would warn of one that does not say that it need not be saved."""

    __torch_unserializable__ = True
    __slots__ = ("_gradients", "_path", "_watched")

    def __init__(self, gradients: OutputGradients, watched: Watched, path: str) -> None:
        self._gradients, self._watched, self._path = gradients, watched, path

    def __call__(self, grad: Tensor | None) -> None:
        if _is_compiling():  # compiled autograd, which traces what hooks do
            return
        gradients, recorder = self._gradients, self._gradients._recorder
        if grad is None or not recorder.attached or recorder.forwards.replaying or not is_plain(grad):
            return
        try:
            gradients.record(self._watched, self._path, grad)
        except Exception as error:  # nothing of ours may end somebody's backward
            recorder.fail(error)
