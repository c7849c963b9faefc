"""DebugUnderflowOverflow, detect_overflow and the rest of the classic module.

    from underflow_overflow import DebugUnderflowOverflow, detect_overflow
    DebugUnderflowOverflow(model)       # or trace_batch_nums=[1, 3], ...
    detect_overflow(hidden_states, "after layer_norm")      # True if NaN or inf

The class is mldebug.DebugUnderflowOverflow, and cheap enough to leave on.
`mldebug overflow -- train.py` needs no edit at all. More: docs/diagnose.md.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.numerics import DebugUnderflowOverflow
from mldebug.numerics.ring._stats import Stats, full

__all__ = ["DebugOption", "DebugUnderflowOverflow", "ExplicitEnum", "detect_overflow", "get_abs_min_max"]


def get_abs_min_max(var: torch.Tensor, ctx: str) -> str:
    """A line of a frame: the smallest and the largest magnitude in `var`, and `ctx`."""
    return _stats(var).line(ctx)


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Whether `var` holds NaN or inf, of either sign; for each kind a line that begins with `ctx` is printed."""
    found = _stats(var)
    kinds = {"nans": found.nan > 0, "infs": found.posinf > 0 or found.neginf > 0}
    for kind in (kind for kind, there in kinds.items() if there):
        print(f"{ctx} has {kind}")
    return any(kinds.values())


def _stats(var: torch.Tensor) -> Stats:
    return full(var.detach() if var.is_floating_point() else var.double())


class ExplicitEnum(str, Enum):
    """An Enum that says which values it has when it is given another."""

    @classmethod
    def _missing_(cls, value: object) -> ExplicitEnum:
        raise ValueError(f"{value} is not a valid {cls.__name__}: it has {[one.value for one in cls]}")


class DebugOption(ExplicitEnum):
    UNDERFLOW_OVERFLOW = "underflow_overflow"
    TPU_METRICS_DEBUG = "tpu_metrics_debug"


if __name__ == "__main__":
    print(__doc__)
