"""compare: the first module or operation where two runs part, by more than their dtypes explain."""

from __future__ import annotations

import copy
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mldebug.core.errors import UsageError
from mldebug.numerics.runs._compare_judge import judge
from mldebug.numerics.runs._compare_report import CompareReport
from mldebug.numerics.runs._compare_run import Run
from mldebug.numerics.runs._recording import record_run

__all__ = ["CompareReport", "compare"]

_OTHER_DTYPE = re.compile(r"same dtype|should be the same|scalar type|mixed dtype|to have dtype", re.IGNORECASE)


def compare(a: Any, b: Any, inputs: Any = None, *, tolerance: float | None = None, ops: bool = False) -> CompareReport:
    """Find the first module where two runs part: its inputs agree, and its outputs do not.

    `a` and `b` are folders that `record_run` wrote, functions without arguments, or models, which are called without
    gradients on copies of `inputs` (a tensor, a tuple of arguments, or a mapping of keyword arguments) and keep their
    buffers. Functions and models run one after the other, from the same random state of torch, numpy and python, and
    `ops=True` records their operations too.

    Errors are relative to a tensor's scale (rms(a - b) / rms, or a fourth of max|a - b| / max, if that is larger).
    What they may be depends on the lowest precision so far: 1e-5 in float32, 2.5e-3 in float16, 0.02 in bfloat16.
    Small errors that grow from module to module part no run until they have taken half of the dtype's digits
    (2 sqrt(eps)). `tolerance` takes the place of both. UsageError for what cannot be compared.

        report = mldebug.compare(model, copy.deepcopy(model).bfloat16(), inputs=ids)
        print(report.text()); report.module
    """
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"tolerance is {tolerance}", "it is an error relative to a tensor's scale, such as 0.01")
    if inputs is not None and not (isinstance(a, nn.Module) and isinstance(b, nn.Module)):
        raise UsageError("inputs are for two models", "functions bring their own: compare(lambda: f(x), lambda: g(x))")
    with tempfile.TemporaryDirectory(prefix="mldebug-compare-") as scratch:
        state = _random_state()
        runs = []
        for name, side in (("a", a), ("b", b)):
            if isinstance(side, (str, os.PathLike)):
                runs.append(Run(Path(side)))
                continue
            _set_random_state(state)  # both begin with the same one
            runs.append(Run(_recorded(Path(scratch, name), side, inputs, ops)))
        return judge(runs[0], runs[1], tolerance, (_name(a, "a"), _name(b, "b")))


def _name(side: Any, name: str) -> str:
    return os.fspath(side) if isinstance(side, (str, os.PathLike)) else name


def _recorded(folder: Path, side: Any, inputs: Any, ops: bool) -> Path:
    scope = record_run(folder, ops=ops)
    if isinstance(side, nn.Module):
        if inputs is None:
            raise UsageError("two models need inputs", "compare(model, other, inputs=ids), or a dict of keywords")
        args, kwargs = _arguments(_own(inputs))
        buffers = [(buffer, buffer.clone()) for buffer in side.buffers()]
        try:
            with torch.no_grad(), scope:
                scope.result(side(*args, **kwargs))
        except RuntimeError as error:
            if _OTHER_DTYPE.search(str(error)) is None:
                raise
            hint = "give functions that cast: compare(lambda: a(x), lambda: b(x.bfloat16()))"
            raise UsageError(f"the inputs are not in the dtype of a model: {error}", hint) from error
        finally:
            with torch.no_grad():
                for buffer, before in buffers:  # BatchNorm's statistics: the other side may be the same model
                    buffer.copy_(before)
    elif callable(side):
        scope.outside = True
        with scope:
            scope.result(side())
    else:
        raise UsageError(f"{side!r} is no folder, function or model", "record_run(folder, model) records a run")
    return folder


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _own(value: Any) -> Any:
    """The same nest of inputs with copies of its tensors, which the model may change."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_own(item) for item in value)
    return {key: _own(item) for key, item in value.items()} if isinstance(value, Mapping) else copy.copy(value)


def _random_state() -> list[Any]:
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized
    cuda = torch.cuda.get_rng_state_all() if is_initialized() else None
    numpy = sys.modules.get("numpy")
    return [torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.random.get_state()]


def _set_random_state(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    if state[3] is not None:
        sys.modules["numpy"].random.set_state(state[3])
