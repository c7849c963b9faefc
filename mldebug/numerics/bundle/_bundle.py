"""An event as a folder: the step's inputs, the operation with its operands, and a program that shows the bad result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mldebug.core.errors import MldebugError
from mldebug.core.report import jsonable
from mldebug.numerics._tell import warn
from mldebug.numerics.bundle._bundle_program import program
from mldebug.numerics.ops._kept import KeptCall
from mldebug.numerics.ops._origins import FINE, state_of

if TYPE_CHECKING:
    from mldebug.numerics._report import NumericsReport
    from mldebug.numerics.bundle._bundle_inputs import HeldInputs, StepInputs

_LIBRARIES = ("numpy", "safetensors", "transformers", "accelerate", "lightning", "triton", "mldebug-toolkit")


def dump(
    folder: str | os.PathLike[str], report: NumericsReport, call: KeptCall | str | None, held: HeldInputs | None
) -> str:
    """Write the bundle of an event; what there is to say of it in a line. A failure is a warning."""
    assert report.event is not None
    inputs = None if held is None else held.of(report.event.batch)
    kept = call if isinstance(call, KeptCall) else None
    try:
        shown = kept is not None and (report.event.kind == "precision" or _shows(kept))
        path, left_out = write_bundle(folder, report, kept, inputs)
    except Exception as error:  # a full disk is no reason to lose the event
        why = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else error.strerror or str(error)
        warn(f"mldebug: cannot write the step to {folder}: {why}\nhint: choose another dump_dir")
        return f"the step was not written to {folder}: {why}"
    if left_out:
        return f"{left_out}: {path} has no repro.py"
    if kept is None:
        why = call if isinstance(call, str) and call else "no operation is known"
        return f"the step was written to {path}, without a repro.py: {why}"
    if not shown:
        return f"the step was written to {path}; by itself the operation did not show it again: it is not deterministic"
    rows = f" ({kept.rows})" if kept.rows else ""
    return f"the step was written: python {shlex.quote(str(path / 'repro.py'))} shows it without the model{rows}"


def _shows(call: KeptCall) -> bool:
    """Whether the operation, run by itself, gives a bad result again."""
    devices = [int(name.rpartition(".")[2]) for name in call.rng if "cuda" in name]
    with torch.no_grad(), torch.random.fork_rng(devices, enabled=bool(call.rng)):
        for name, state in call.rng.items():
            if name == "torch.cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, int(name.rpartition(".")[2]))
        return any(state_of(tensor) > FINE for tensor in call.run())


def write_bundle(
    folder: str | os.PathLike[str], report: NumericsReport, call: KeptCall | None, inputs: StepInputs | None
) -> tuple[Path, str]:
    """Write `folder/step<N>-rank<R>` for an event; its path (`-2`, `-3` ... if there is one already), and why it has no
    repro.py although the operation was kept.

    report.json is the report and environment.json the versions and switches. Of the operation, if it was kept,
    operands.safetensors are the operands and repro.py runs it; of the step, if they were kept, inputs.safetensors and
    inputs.json are the arguments of the model and rng.safetensors and rng.json the random states before its forward.
    No pickle is written. The folder has its name once it is whole. Raises OSError where it cannot be written.
    """
    assert report.event is not None
    parent = Path(folder)
    parent.mkdir(parents=True, exist_ok=True)
    name = f"step{report.event.step}-rank{report.event.rank}"
    part = parent / f".{name}.part"
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    left_out = ""
    try:
        write_json(part / "report.json", report.to_dict())
        write_json(part / "environment.json", environment())
        if call is not None:
            try:
                text, operands = program(call, report.verdict, report.event.kind == "precision")
                save(operands, part / "operands.safetensors")
                (part / "repro.py").write_text(text, encoding="utf-8")
            except MldebugError as error:
                left_out = error.message
        if inputs is not None:
            inputs.write(part)
        return _renamed(part, parent / name), left_out
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors, from the CPU."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    """Versions of what computes, its devices, and the switches that change results."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    initialized = torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call,unused-ignore]
    if initialized:
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["allow_tf32"] = torch.backends.cuda.matmul.allow_tf32
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call,unused-ignore]
    return found


def _renamed(part: Path, target: Path) -> Path:
    number = 1
    while True:
        path = target if number == 1 else target.with_name(f"{target.name}-{number}")
        try:
            if not path.exists():
                return part.rename(path)
        except OSError:
            if not path.exists():
                raise
        number += 1
