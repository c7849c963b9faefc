"""torch.compile must not compile the tracer: Dynamo looks at each Python frame that begins, ours among them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any


def hide_from_dynamo() -> bool:
    """Have Dynamo pass over this room's functions and what they call. False: PyTorch is not loaded, ask again."""
    eval_frame: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if eval_frame is None:
        return False
    with contextlib.suppress(AttributeError, TypeError):  # a PyTorch that has none of these
        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
            for code in _codes():
                eval_frame.set_code_exec_strategy(code, skip)
        else:  # before 2.6
            for code in _codes():
                eval_frame.skip_code(code)
    return True


def _codes() -> Iterator[CodeType]:
    room = __name__.rpartition(".")[0] + "."
    for name, module in list(sys.modules.items()):
        if name.startswith(room) and isinstance(module, ModuleType):
            for value in list(vars(module).values()):
                for item in list(vars(value).values()) if isinstance(value, type) else [value]:
                    function = item.fget if isinstance(item, property) else getattr(item, "__func__", item)
                    if isinstance(function, FunctionType) and function.__module__.startswith(room):
                        yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
