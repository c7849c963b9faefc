"""The root modules that a recorder watches, and the modules below them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from mldebug.numerics import _hub
from mldebug.numerics.ring._records import Watched

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow


class Roots:
    """The roots of one recorder. With `adopt_all` every module that is called outside any root becomes one."""

    def __init__(self, recorder: DebugUnderflowOverflow, adopt_all: bool) -> None:
        self._recorder = recorder
        self._adopt_all = adopt_all
        self._roots: list[weakref.ref[nn.Module]] = []

    def add(self, module: nn.Module) -> None:
        """Watch a root and all that is in it."""
        self._roots.append(weakref.ref(module))
        self._recorder.when_dead(module, self._recorder.weights.release)
        for other in (recorder.roots for recorder in _hub.RECORDERS):
            if other._adopt_all and other is not self and not other.holds(module):
                other.add(module)  # the command watches what the script's own recorder watches
        for name, child in module.named_modules():
            self._watch(child, name, module)

    def adopt(self, module: nn.Module) -> Watched | None:
        """A module met for the first time: one added to a root since, or (watching all roots) a new root."""
        call = self._recorder.forwards.call
        root = None if call is None else call.watched.root()
        if call is not None and root is not None:
            if call.names is None:  # one walk a forward, however many modules are new
                call.names = {id(child): name for name, child in root.named_modules()}
            name = call.names.get(id(module))
            if name is not None:
                return self._watch(module, name, root)
        if self._adopt_all and not isinstance(module, torch.fx.GraphModule):
            self.add(module)
            return _hub.find(self._recorder, module)
        return None

    def outside(self) -> Watched:
        """Stands for the root in a call that has none: values checked outside any module."""
        root = self._roots[0]() if self._roots else None
        module = root if root is not None else nn.Identity()
        return _hub.find(self._recorder, module) or Watched(self._recorder, module, "", module)

    def holds(self, module: nn.Module | None) -> bool:
        """Whether a module is one of the roots."""
        return any(ref() is module for ref in self._roots)

    def _watch(self, module: nn.Module, name: str, root: nn.Module) -> Watched:
        watched = _hub.watch(self._recorder, module, name, root)
        watched.muted = self._recorder.filter.mutes(name, module)
        self._recorder.weights.add(watched, module)
        return watched
