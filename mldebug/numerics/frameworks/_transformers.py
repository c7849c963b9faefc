"""transformers' own flag `--debug underflow_overflow` with our recorder, and the end of a Trainer's run."""

from __future__ import annotations

import difflib
import functools
import importlib.machinery
import inspect
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from mldebug.core.errors import UsageError
from mldebug.numerics import _hub
from mldebug.numerics._arguments import check_arguments
from mldebug.numerics._recorder import DebugUnderflowOverflow

_DEBUG, _TRAINER = "transformers.debug_utils", "transformers.trainer"
_CLASS = "DebugUnderflowOverflow"


def patch_transformers(**options: Any) -> Callable[[], None]:
    """Make `--debug underflow_overflow` (`TrainingArguments(debug=...)`) use this recorder; returns what undoes it.

    From here on transformers' own class of this name is ours, wherever it is imported from; transformers itself is not
    imported by this. `options` are those of DebugUnderflowOverflow; wrong ones are a UsageError when the Trainer makes
    the recorder, and an event is a NumericsError out of `train()`. A recorder that the flag makes is taken off when
    `train()` ends. What is returned takes no argument, and gives transformers its own class back.
    `mldebug overflow -- train.py --debug underflow_overflow` needs no such line.

        mldebug.patch_transformers(on_event="warn")
        Trainer(model, TrainingArguments("out", debug="underflow_overflow"), train_dataset=data).train()
    """
    check_options("patch_transformers", options)
    return _Swap(functools.partial(_watch, options)).undo


def check_options(who: str, options: dict[str, Any]) -> None:
    """UsageError for options that the recorder will not take: now, and not when the model is loaded and training
    begins."""
    known = dict(inspect.signature(DebugUnderflowOverflow).parameters)
    del known["model"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"the options are {', '.join(known)}"
            raise UsageError(f"{who}() has no option {name!r}", hint)
    values = {name: options.get(name, parameter.default) for name, parameter in known.items()}
    check_arguments(
        None, values["max_frames_to_save"], values["check"], values["on_event"], values["on_step"],
        values["abort_after_batch_num"],
    )  # fmt: skip


def watched_already() -> Callable[[], None]:
    """For the command, which watches every model: transformers' class then adds nothing; returns what undoes it."""

    def make(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (args or kwargs) and _hub.RECORDERS:
            return _watch({}, model, *args, **kwargs)  # it is asked for more: batches to trace, say
        return None

    return _Swap(make).undo


def _watch(options: dict[str, Any], model: nn.Module, *args: Any, **kwargs: Any) -> DebugUnderflowOverflow:
    recorder = DebugUnderflowOverflow(model, *args, **{**options, **kwargs})
    if _open:  # made by the flag, inside train()
        _open[-1].append(recorder)
    return recorder


class _Swap:
    """Puts `make` in the place of transformers' class, now or when its module is loaded."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._undo: list[Callable[[], None]] = []
        self._finder = _Finder({_DEBUG: self._swap, _TRAINER: self._trainer})
        for name, function in self._finder.wanted.items():
            if name in sys.modules:
                function(sys.modules[name])
        sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._undo:
            self._undo.pop()()

    def _swap(self, module: ModuleType) -> None:
        original = getattr(module, _CLASS)
        if original is self._make:
            return
        setattr(module, _CLASS, self._make)
        self._undo.append(functools.partial(setattr, module, _CLASS, original))

    def _trainer(self, module: ModuleType) -> None:
        self._swap(module)  # it may have been loaded before, with a name of its own
        self._undo.append(_wrap_train(module.Trainer))


class _Finder:
    """Calls a function when one of the modules that are wanted has been loaded, by whatever finds and loads it."""

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        self.wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.wanted:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(name, path, target)
            if spec is not None:
                self._tell_when_loaded(spec)
                return spec
        return None

    def _tell_when_loaded(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for finder in list(sys.meta_path):
                if isinstance(finder, _Finder) and module.__name__ in finder.wanted:
                    finder.wanted[module.__name__](module)

        loader.exec_module = exec_module  # of this one module: each spec has a loader of its own


# The end of train(): a callback of transformers is told of the end of a run that ends well, and not of an exception.

_open: list[list[Any]] = []  # for each train() under way, what is to end with it


class TrainerEnds:
    """Calls `callback.end(exc)` when a `Trainer.train()` that has this callback ends."""

    def __init__(self, callback: Any) -> None:
        self._callback = weakref.ref(callback)
        self._wrapped = False
        self.look()

    def look(self) -> None:
        """Once transformers is loaded, wrap its train(), as long as the callback lives."""
        callback, module = self._callback(), sys.modules.get(_TRAINER)
        if callback is not None and not self._wrapped and hasattr(module, "Trainer"):
            self._wrapped = True
            weakref.finalize(callback, _wrap_train(module.Trainer)).atexit = False  # type: ignore[union-attr]

    def begins(self) -> None:
        """The train() under way is one with this callback."""
        if _open:
            _open[-1].append(self._callback())


_wraps: dict[type, tuple[Any, int]] = {}  # Trainer -> its own train, how many want it wrapped


def _wrap_train(trainer: type) -> Callable[[], None]:
    """Wrap `Trainer.train`, once for all who ask; returns what takes one's share of it back."""
    own, users = _wraps.get(trainer, (trainer.train, 0))  # type: ignore[attr-defined]
    _wraps[trainer] = own, users + 1
    if not users:

        @functools.wraps(own)
        def train(self: Any, *args: Any, **kwargs: Any) -> Any:
            ours: list[Any] = []
            _open.append(ours)
            try:
                result = own(self, *args, **kwargs)
            except BaseException as error:
                _end(ours, error)
                raise
            else:
                _end(ours, None)
            finally:
                _open[:] = [other for other in _open if other is not ours]
            return result

        trainer.train = train  # type: ignore[attr-defined]

    def undo() -> None:
        own, users = _wraps[trainer]
        _wraps[trainer] = own, users - 1
        if users == 1:
            del _wraps[trainer]
            if getattr(trainer.train, "__wrapped__", None) is own:  # type: ignore[attr-defined]
                trainer.train = own  # type: ignore[attr-defined]

    return undo


def _end(ours: list[Any], error: BaseException | None) -> None:
    while ours:
        thing = ours.pop()
        if isinstance(thing, DebugUnderflowOverflow):
            thing.stop(error)
        else:
            thing.end(error)
