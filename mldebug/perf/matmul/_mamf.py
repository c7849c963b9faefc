"""mamf(): the maximum achievable matmul FLOPS of a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from mldebug.core.errors import UsageError
from mldebug.perf.matmul._blocks import Shape
from mldebug.perf.matmul._report import MamfReport
from mldebug.perf.matmul._run import Options, run


def mamf(
    dtype: str = "bfloat16",
    *,
    device: str = "auto",
    index: int | None = None,
    seconds: float | None = None,
    shapes: Sequence[Shape] = (),
    extra: Sequence[Shape] = (),
    also: Sequence[Shape] = (),
    exhaustive: bool = False,
    scaling: str = "tensor",
    fast_accum: bool = True,
    seed: int | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> MamfReport:
    """Find how many TFLOPS matrix products reach on this device, sustained and in a burst, and at which shape.

    An adaptive search in about 55 seconds (10 on a CPU), all included, or in `seconds`: many shapes are measured in
    interleaved random order as shares of a reference shape, fewer and longer each round, and the winner alone at the
    end. `shapes` are (m, n, k) to measure in its place, `exhaustive` each of them once however long that takes; `extra`
    are more seeds for the search, `also` shapes to measure beside it, (m, n, k) or (m, n, k, batch).

    `dtype` as torch spells it, or bf16, fp8, tf32 ...; `scaling` ("tensor" or "row") and `fast_accum` are for fp8.
    Every block goes to a JSONL file at once: `output`, or one in the current folder; `resume` goes on where such a file
    ends. Ctrl-C and SIGTERM return what is known so far. Raises UsageError for a device or dtype that is not here,
    MldebugError where nothing can be measured.

        report = mamf("bf16")
        print(report.sustained, report.shape)
    """
    if seconds is not None and not seconds > 0:
        raise UsageError(f"seconds is {seconds}", "give it more than 0; the default takes about a minute")
    for shape in (*shapes, *extra, *also):
        if len(shape) not in ((3, 4) if shape in also else (3,)) or min(shape) < 1:
            raise UsageError(f"{shape!r} is no shape", "a shape is three sizes of 1 or more: (m, n, k)")
    options = Options(
        dtype, device, index, seconds, tuple(shapes), tuple(extra), exhaustive, scaling, fast_accum, seed,
        None if output is None else os.fspath(output), None if resume is None else os.fspath(resume), tuple(also),
    )  # fmt: skip
    return run(options, progress or (lambda text: None))
