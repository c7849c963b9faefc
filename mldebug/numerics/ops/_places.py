"""Where in a step an operation runs: in which module, or in the optimizer, clipping of gradients, the loss scale."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from mldebug.numerics import _hub
from mldebug.numerics.ops._operands import tensors_in
from mldebug.numerics.ops._origins import state_of
from mldebug.numerics.ops._source import callers

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow
    from mldebug.numerics.ops._nodes import Parameters
    from mldebug.numerics.ops._origins import Origin
    from mldebug.numerics.ring._records import Watched


class ModuleStack:
    """The modules whose forward runs, outermost first; each thread has its own."""

    def __init__(self) -> None:
        self._here = threading.local()

    @property
    def now(self) -> list[nn.Module]:
        stack: list[nn.Module] | None = getattr(self._here, "stack", None)
        if stack is None:
            stack = self._here.stack = []
        return stack

    def clear(self) -> None:
        self._here.stack = []

    def leave(self, module: nn.Module) -> None:
        stack = self.now
        while stack and stack.pop() is not module:
            pass  # modules that raised in between

    def owner(self, recorder: DebugUnderflowOverflow) -> Watched | None:
        """The innermost module that runs and that the recorder watches."""
        for module in reversed(self.now):
            watched = _hub.find(recorder, module)
            if watched is not None:
                return watched
        return None


def place_in_step(origin: Origin, pairs: Sequence[tuple[str, Any]], parameters: Parameters) -> None:
    """Outside the modules: the optimizer, the clipping of gradients, the loss scale."""
    if callers("optim/"):
        origin.phase = "optimizer"
        for _, value in pairs:
            for tensor in tensors_in(value):
                found = parameters.of(tensor)
                if found is not None and (origin.param is None or state_of(tensor)):
                    origin.owner, origin.param = found
                    if state_of(tensor):
                        return
    elif callers("nn/utils/clip_grad"):
        origin.phase = "backward"
    elif callers("amp/grad_scaler"):
        origin.by_scaler = True
