"""One callback that sends the numbers of each step to TensorBoard, Weights & Biases, or a writer like theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.world import world

OnStep = Callable[[int, dict[str, float]], None]


def scalar_logger(where: Any = None, prefix: str = "mldebug/") -> OnStep:
    """A function for `on_step` that logs loss, grad_norm and absmax of every step.

    Args:
        where: "tensorboard" (a new SummaryWriter in ./runs), "wandb" (the active run), or an object of your own with
            `add_scalar(name, value, step)` or `log(dict)`. None takes the active wandb run if there is one, else
            TensorBoard if it is installed.
        prefix: put before each name.

    Raises:
        MldebugError: nothing to log to: no such package, no active wandb run.

    Steps are optimizer steps; under several ranks the new SummaryWriter's folder is one per rank.

        DebugUnderflowOverflow(model, on_step=scalar_logger())
        DebugUnderflowOverflow(model, on_step=scalar_logger(writer, prefix="numerics/"))
    """
    if where is None:
        run = _wandb_run()
        return _to_wandb(run, prefix) if run is not None else _to_writer(_summary_writer(_NOTHING), prefix)
    if where == "wandb":
        run = _wandb_run()
        if run is None:
            raise MldebugError("there is no active wandb run", "call wandb.init() before, or pass the run itself")
        return _to_wandb(run, prefix)
    if where == "tensorboard":
        return _to_writer(_summary_writer("TensorBoard is not installed"), prefix)
    if callable(getattr(where, "add_scalar", None)):
        return _to_writer(where, prefix)
    if callable(getattr(where, "log", None)):
        return _to_wandb(where, prefix)
    raise UsageError(
        f"scalar_logger cannot log to {where!r}",
        'use "tensorboard", "wandb", or an object with add_scalar(name, value, step) or log(dict)',
    )


_NOTHING = "there is neither an active wandb run nor TensorBoard to log to"


def _to_writer(writer: Any, prefix: str) -> OnStep:
    def log(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(f"{prefix}{name}", value, step)
        if flush is not None:
            flush()  # the run may end at any step: that is what this is for

    flush = getattr(writer, "flush", None)
    return log


def _to_wandb(run: Any, prefix: str) -> OnStep:
    # Their step counts log calls and may not go back; a training script that logs as well has its own idea of it.
    # So the step goes along as a value, and is made the axis where the run can do that.
    axis = f"{prefix}step"
    define = getattr(run, "define_metric", None)
    if callable(define):
        define(axis)
        define(f"{prefix}*", step_metric=axis)

    def log(step: int, scalars: dict[str, float]) -> None:
        run.log({axis: step, **{f"{prefix}{name}": value for name, value in scalars.items()}})

    return log


def _wandb_run() -> Any:
    """The active run; wandb is not imported for it, as nobody can have started one then."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _summary_writer(problem: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MldebugError(problem, "pip install tensorboard, or call wandb.init() before") from error
    here = world()
    suffix = f"-rank{here.rank}" if here.world_size > 1 else ""
    return SummaryWriter(filename_suffix=suffix, comment=suffix)
