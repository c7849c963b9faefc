"""Recording under torch.compile: a custom op hands over what modules return inside a graph, and breaks no graph."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mldebug.numerics.runs._recording import Recorder

_SITES: list[tuple[nn.Module, str]] = []  # the index is what a graph carries
_RECORDERS: list[Recorder] = []
_ORDER = torch.zeros(1)  # the op says that it changes this, which keeps the calls, and their order
_MAX_DEPTH = 4

_library: Any = torch.library.Library("mldebug", "FRAGMENT")  # type: ignore[no-untyped-call,unused-ignore]
_library.define("compare_begin(Tensor(a!) order) -> ()")
_library.define("compare_output(Tensor(a!) order, Tensor value, int site) -> ()")


def _output(order: Tensor, value: Tensor, site: int) -> None:
    module, path = _SITES[site]
    for recorder in _RECORDERS:
        recorder.guard(recorder.compiled_output, module, path, value)


def _begin(order: Tensor) -> None:
    for recorder in _RECORDERS:
        recorder.guard(recorder.begin)


_library.impl("compare_begin", _begin, "CompositeExplicitAutograd")
torch.library.register_fake("mldebug::compare_begin", lambda order: None, lib=_library)
_library.impl("compare_output", _output, "CompositeExplicitAutograd")
torch.library.register_fake("mldebug::compare_output", lambda order, value, site: None, lib=_library)


def start(recorder: Recorder) -> list[Callable[[], Any]]:
    """Send it what graphs compute; returns what undoes it. Graphs that were compiled before know nothing of it."""
    filters = list(warnings.filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
    _RECORDERS.append(recorder)
    _forget_graphs()

    def undo() -> None:
        _RECORDERS.remove(recorder)
        warnings.filters[:] = filters  # type: ignore[index]
        _forget_graphs()
        if not _RECORDERS:
            _SITES.clear()

    return [undo]


def trace_entered(module: nn.Module) -> None:
    """The pre-hook, while dynamo traces it."""
    if _is_root(id(module)):
        torch.ops.mldebug.compare_begin(_ORDER)


def trace_left(module: nn.Module, output: Any) -> None:
    """The hook after forward, while dynamo traces it."""
    _walk(id(module), output, "output", 0)


def _walk(key: int, value: Any, path: str, depth: int) -> None:
    if isinstance(value, Tensor):
        site = _site(key, path)
        if site >= 0:
            torch.ops.mldebug.compare_output(_ORDER, value.detach(), site)
    elif depth < _MAX_DEPTH and isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            _walk(key, item, f"{path}[{i}]", depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, Mapping):
        for name, item in value.items():
            _walk(key, item, f"{path}.{name}", depth + 1)


def _site(key: int, path: str) -> int:
    """Asked in the trace, where its answer is a constant."""
    for recorder in _RECORDERS:
        found = recorder.module_of(key)
        if found is not None:
            _SITES.append((found, path))
            return len(_SITES) - 1
    return -1


def _is_root(key: int) -> bool:
    return any(recorder.is_root(key) for recorder in _RECORDERS)


_is_root._dynamo_marked_constant = True  # type: ignore[attr-defined]
_site._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def _forget_graphs() -> None:
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["stats"]:
        dynamo.reset()
