"""OverflowCallback: the recorder inside the training loops of transformers and Lightning."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from mldebug.core.world import world
from mldebug.numerics._recorder import DebugUnderflowOverflow
from mldebug.numerics._report import NumericsError, NumericsReport
from mldebug.numerics._tell import warn
from mldebug.numerics.frameworks._transformers import TrainerEnds, check_options

# The classes of callbacks that this one is an instance of, where they are loaded: some code asks by isinstance.
_BASES = (
    ("transformers.trainer_callback", "TrainerCallback"),
    ("lightning.pytorch.callbacks.callback", "Callback"),
    ("pytorch_lightning.callbacks.callback", "Callback"),
)
_HOOKS = ("on_", "setup", "teardown", "state_dict", "load_state_dict")


class OverflowCallback:
    """Watch a training run of `transformers.Trainer`, `lightning.Trainer` or `pytorch_lightning.Trainer`.

    Attaches a DebugUnderflowOverflow when training begins (the model is wrapped and on its device, a checkpoint is
    loaded), and takes it off when training ends or fails. Steps are optimizer steps: micro-batches of gradient
    accumulation and evaluation are none. A resumed run of transformers goes on with the number of its step. Nothing is
    added to checkpoints.

    Args:
        folder: where `overflow_report.json` and `overflow_report.html` go when there was an event, benign ones apart;
            None for the trainer's own folder (`output_dir`, `default_root_dir`), "" to write nothing.
        options: those of DebugUnderflowOverflow: on_event, check, include, exclude, on_step, output, ...

    Raises:
        UsageError: an option that DebugUnderflowOverflow does not take.
        NumericsError: out of `trainer.train()` or `trainer.fit()`, with on_event="raise".

    Example:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[OverflowCallback()])
        trainer.train()
    """

    def __new__(cls, *args: Any, **options: Any) -> OverflowCallback:
        return object.__new__(_with_bases(cls))

    def __init__(self, *, folder: str | os.PathLike[str] | None = None, **options: Any) -> None:
        check_options("OverflowCallback", options)
        self._folder, self._options = folder, options
        self._home: str | None = None  # the trainer's folder
        self._recorder: DebugUnderflowOverflow | None = None
        self._last: NumericsReport | None = None
        self._batches = 0  # root forwards before this batch
        self._ends = TrainerEnds(self)

    @property
    def recorder(self) -> DebugUnderflowOverflow | None:
        """The recorder at work; None before training and after."""
        return self._recorder

    @property
    def report(self) -> NumericsReport | None:
        """What was found in the run under way, or in the last one; None before the first."""
        return self._last if self._recorder is None else self._recorder.report

    def begin(self, model: nn.Module, home: str | os.PathLike[str] | None = None, step: int = 0) -> None:
        """Start to watch a model whose next optimizer step has this number."""
        self.end()  # a run that ended without telling
        self._home = None if home is None else os.fspath(home)
        self._recorder = DebugUnderflowOverflow(model, **self._options)
        self._recorder.step = step

    def end(self, exc: BaseException | None = None) -> None:
        """Take the recorder off, and keep what it found. Safe to call twice."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        try:
            recorder.stop(exc)
        except NumericsError as error:
            self._last = error.report or recorder.report
            raise
        finally:
            self._last = recorder.report
            self._save(self._last)

    # transformers.

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """A Trainer of transformers is made: it may have been imported only now."""
        self._ends.look()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """The training of a transformers Trainer begins."""
        self._ends.begins()
        self.begin(model, args.output_dir, state.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Training is over, in either framework."""
        self.end()

    # Lightning.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has set the model up."""
        self.begin(pl_module, trainer.default_root_dir)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoint loaded, sanity check over."""
        if self._recorder is not None:
            self._recorder.step = trainer.global_step

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """The loss is made in training_step, which is no module. It carries the loss scale and the accumulation."""
        recorder = self._recorder
        if recorder is not None:
            recorder.guard(self._record_loss, recorder, trainer, loss)
            if recorder.forwards.batches == self._batches:  # training_step called parts of the module, and not itself
                recorder.forwards.count_batch()
            self._batches = recorder.forwards.batches

    @staticmethod
    def _record_loss(recorder: DebugUnderflowOverflow, trainer: Any, loss: Any) -> None:
        value = loss.detach() * trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(scaler, "_scale", None) is not None:
            value = value / scaler._scale
        recorder.values.record(value, "loss", "loss")

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """A batch begins."""
        if self._recorder is not None:
            self._batches = self._recorder.forwards.batches

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The run ends by an exception: ours, or another."""
        self.end(exception)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """The end of fit, validate, test or predict."""
        self.end()

    @property
    def state_key(self) -> str:
        """Lightning's name of a callback in checkpoints: there is nothing in them, but two may not have one name."""
        return f"OverflowCallback-{id(self)}"

    _legacy_state_key = state_key

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep in a checkpoint."""
        return {}

    # Both.

    def __getattr__(self, name: str) -> Any:
        # A framework that was imported after this was made calls all of its hooks.
        if name.startswith(_HOOKS):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> Any:
        return _again, (self._folder, self._options)  # copies and spawned processes start anew

    def _save(self, report: NumericsReport) -> None:
        folder = self._home if self._folder is None else self._folder
        if report.ok or report.event is None or not folder:
            return
        here = world()
        rank = f".rank{here.rank}" if here.world_size > 1 else ""
        path = Path(folder, f"overflow_report{rank}.json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(report.json() + "\n", encoding="utf-8")
            report.html(path.with_suffix(".html"))
        except Exception as error:  # a full disk is no reason to lose the event
            warn(f"mldebug: cannot write {path}: {error}\nhint: choose another folder: OverflowCallback(folder=...)")


def _with_bases(cls: type) -> type:
    """The class with the callback classes of the frameworks that are loaded."""
    loaded = [getattr(sys.modules[module], name) for module, name in _BASES if module in sys.modules]
    bases = tuple(base for base in loaded if not issubclass(cls, base))
    if not bases:
        return cls
    key = cls, bases
    if key not in _MADE:
        _MADE[key] = type(cls.__name__, (cls, *bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    return _MADE[key]


_MADE: dict[tuple[type, tuple[type, ...]], type] = {}


def _again(folder: Any, options: dict[str, Any]) -> OverflowCallback:
    return OverflowCallback(folder=folder, **options)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
