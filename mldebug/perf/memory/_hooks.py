"""When a training script enters and leaves a forward, a backward and an optimizer step, without an edit of it."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_is_compiling = torch.compiler.is_compiling


class Listener(Protocol):
    """What is called. An error of it is told to `failed` and goes no further."""

    def forward_begins(self, root: nn.Module) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ended(self) -> None: ...
    def step_begins(self, optimizer: torch.optim.Optimizer) -> None: ...
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None: ...
    def failed(self, exc: Exception) -> None: ...


class Hooks:
    """torch's process-wide hooks, and `torch.autograd.backward` replaced by itself with two calls around it.

    The hooks on modules are there while `modules` is true: only then is it known which module runs.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._undo: list[Callable[[], None]] = []
        self._module_undo: list[Callable[[], None]] = []
        self._running = threading.local()
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def install(self) -> None:
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_step).remove)
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return original(*args, **kwargs)
            self._tell(self._listener.backward_begins)
            try:
                return original(*args, **kwargs)
            finally:
                self._tell(self._listener.backward_ended)

        torch.autograd.backward = backward

        def restore() -> None:
            if torch.autograd.backward is backward:  # else somebody has wrapped it since, and calls it
                torch.autograd.backward = original

        self._undo.append(restore)
        # torch warns that its hooks are called once more for a compiled model; ours are made for that.
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        if warnings.filters[0] not in before:  # the script may have the same
            self._undo.append(functools.partial(_drop_filter, warnings.filters[0]))
        self.watch_modules(True)

    def remove(self) -> None:
        self.watch_modules(False)
        while self._undo:
            with contextlib.suppress(Exception):
                self._undo.pop()()

    def watch_modules(self, on: bool) -> None:
        if on and not self._module_undo:
            self._running = threading.local()
            self._module_undo.append(register_module_forward_pre_hook(self._before_forward).remove)
            self._module_undo.append(register_module_forward_hook(self._after_forward, always_call=True).remove)
        elif not on:
            while self._module_undo:
                self._module_undo.pop()()
            self._running = threading.local()

    def running(self) -> str:
        """The name of the module whose forward runs in this thread; "" for none."""
        stack = getattr(self._running, "stack", None)
        return self._name(stack[-1]) if stack else ""

    def _name(self, module: nn.Module) -> str:
        entry = self._names.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else type(module).__name__

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if _is_compiling():
            return
        stack = self._running.__dict__.setdefault("stack", [])
        if not stack:
            self._tell(self._enter_root, module)
            stack = self._running.__dict__.setdefault("stack", [])
        if self._module_undo:
            stack.append(module)

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if _is_compiling():
            return
        stack = self._running.__dict__.get("stack", [])
        while stack and stack.pop() is not module:  # modules whose hook an exception has left out
            pass

    def _enter_root(self, module: nn.Module) -> None:
        entry = self._names.get(id(module))
        if entry is None or entry[0]() is not module:
            if any(_is_compiled(inner) for inner in module.modules()):
                self.watch_modules(False)  # compiled code is made for the hooks that are there: with them, then without
            title = type(module).__name__
            for name, inner in module.named_modules():
                self._names[id(inner)] = (weakref.ref(inner), f"{title}.{name}" if name else title)
        self._listener.forward_begins(module)

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not _is_compiling():
            self._tell(self._listener.step_begins, optimizer)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not _is_compiling():
            self._tell(self._listener.step_ended, optimizer)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as exc:
            self._listener.failed(exc)


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was put on it, around it or by `module.compile()`."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def compiler_is_in_use() -> bool:
    """Whether the script has called torch.compile: whatever it compiles while hooks are there is made again without."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    # Optimizers load the compiler, too, and switch it off for themselves: that has no backend.
    return frames is not None and any(getattr(frames, "cached_backends", {0: True}).values())


def _drop_filter(entry: Any) -> None:
    filters: Any = warnings.filters
    if entry in filters:
        filters.remove(entry)
