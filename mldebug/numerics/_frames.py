"""Frames: what the classic report shows of each module call, taken from the live tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mldebug.numerics._event import Role
from mldebug.numerics._tensors import leaves, parts
from mldebug.numerics.ring._records import Watched
from mldebug.numerics.ring._stats import Stats, full

PREFIX = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


@dataclass
class Finding:
    """The first bad tensor met while frames were taken, and the module whose code made it."""

    owner: Watched
    role: Role
    name: str
    tensor: Tensor
    stats: Stats
    param: str | None = None


class Frames:
    """Builds a frame per module call and watches for the first bad tensor.

    The text is that of the classic class, number for number: parameters, inputs, outputs, each with abs min and abs
    max; nested outputs, which it called "not a tensor", get a line per tensor. `on_frame` is called with each
    finished frame. Used by a replay, by `check="each"` and for the batches of `trace_batch_nums`.

    `whole` is False where some modules are left out: then nobody knows who made a bad input of an inner module.
    A bad input alone is no finding (a model may mask it away): it becomes one when a bad output follows.
    """

    def __init__(
        self, limit: int, on_frame: Callable[[str], None] | None = None, whole: bool = True, live: bool = True
    ) -> None:
        self.texts: deque[str] = deque(maxlen=limit)
        self.finding: Finding | None = None
        self.masks: list[Finding] = []  # outputs whose only extreme is -inf: fine, unless NaN follows from them
        self.done = False  # the finding was handled; the rest of the call is of no interest
        self._suspect: Finding | None = None  # the first bad input
        self._stack: list[Watched] = []
        self._on_frame = on_frame
        self._whole = whole
        self._live = live
        self._head = ""

    def begin_batch(self, batch: int) -> None:
        """Put the classic batch header before the next frame."""
        self._head = f"\n\n{PREFIX} *** Starting batch number={batch} ***\n{COLUMNS}\n"

    def enter(self, watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run. A bad input that no earlier module made was made by the code of its caller."""
        if watched.wrapper:
            return  # the module inside it has the frame
        caller = self._stack[-1] if self._stack else watched
        if caller is watched and not self._live:
            pass  # inputs of the root: a replay judges them by running without them
        elif self._suspect is None and not watched.muted and not self.done and (self._whole or caller is watched):
            for path, leaf in _inputs(args, kwargs):
                name = path if caller is watched else f"{path} of {watched.name}"
                self._suspect = self._look(caller, "input", name, leaf)
                if self._suspect is not None:
                    break
        self._stack.append(watched)

    def leave(
        self, watched: Watched, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """A module has run: build its frame."""
        if watched.wrapper:
            return
        while self._stack and self._stack.pop() is not watched:
            pass  # modules that raised in between
        if watched.muted or self.done:
            return
        lines = [f"{PREFIX} {watched.name} {watched.cls}"]
        for name, param in module.named_parameters(recurse=False):
            lines.append(text_line(param, name))
            self._find(watched, "parameter", name, param)
        for path, leaf in _inputs(args, kwargs):
            lines.append(text_line(leaf, path))
        for path, leaf in leaves(output, "output"):
            lines.append(text_line(leaf, path))
            self._find(watched, "loss" if path == "output.loss" else "output", path, leaf)
        text = self._head + "\n".join(lines)
        self._head = ""
        self.texts.append(text)
        if self._on_frame is not None:
            self._on_frame(text)

    def innermost(self) -> Watched | None:
        """The module whose code is running."""
        return self._stack[-1] if self._stack else None

    def _find(self, owner: Watched, role: Role, name: str, leaf: Any) -> None:
        if self.finding is None:
            found = self._look(owner, role, name, leaf)
            if found is not None:
                self.finding = found if role == "parameter" or self._suspect is None else self._suspect

    def _look(self, owner: Watched, role: Role, name: str, leaf: Any) -> Finding | None:
        for part in parts(leaf) if isinstance(leaf, Tensor) else ():
            if torch.isfinite(part).all().item():
                continue
            stats = full(part)
            found = Finding(owner, role, name, part, stats)
            if role == "parameter":
                found.param = f"{owner.name}.{name}" if owner.name else name
            strict = (role == "parameter" and leaf.requires_grad) or (role == "output" and owner.computes)
            if stats.alarms(strict):
                return found
            if role == "output":
                self.masks.append(found)
        return None


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [pair for i, value in enumerate(args) for pair in leaves(value, f"input[{i}]")]
    for key, value in kwargs.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            found += leaves(value, f"input.{key}")
    return found


def text_line(value: Any, name: str) -> str:
    """One line of a frame for any value."""
    if value is None:
        return f"{'None':>17} {name}"
    if not isinstance(value, Tensor):
        return f"{'not a tensor':>17} {name}"
    try:
        return _tensor_line(value.detach(), name)
    except Exception:  # a dtype, layout or subclass without these reductions
        return f"{'no values':>17} {name}"


def _tensor_line(tensor: Tensor, name: str) -> str:
    pieces = parts(tensor)
    if not pieces:
        if tensor.is_meta or tensor.numel() == 0:
            return f"{'meta' if tensor.is_meta else 'empty':>17} {name}"
        pieces = [tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor]
    lows, highs = [], []
    for piece in pieces:
        magnitude = torch.linalg.vector_norm(piece, dim=-1) if tensor.is_complex() else piece.abs()
        lows.append(float(magnitude.min()))
        highs.append(float(magnitude.max()))
    low, high = (math.nan, math.nan) if any(x != x for x in highs) else (min(lows), max(highs))
    return f"{low:8.2e} {high:8.2e} {name}"
