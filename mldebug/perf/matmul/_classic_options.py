"""What the classic finder's options mean: sizes and ranges, the card, and the status at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mldebug.core.device import find_device
from mldebug.core.errors import UsageError
from mldebug.perf.matmul._classic import classic_search

_WARM = 30.0  # seconds for a card to reach the clocks it holds
_WARM_CPU = 0.5  # a CPU is there for a try only


def classic_main(
    sizes: Sequence[tuple[str, Sequence[int] | None, Sequence[int] | None]],
    *,
    num_iterations: int,
    num_warmup_iterations: int,
    cuda_device: int,
    output_file: str | os.PathLike[str],
    notes: str,
    verbose: bool,
    dtype: str,
) -> int:
    """Search as the classic script's command line says, and return its exit status: 0, 1 if no shape was measured,
    130 and 143 after SIGINT and SIGTERM. `sizes` are ("m", listed sizes or None, START STOP STEP or None) of m, n
    and k. Numbers that cannot be are a UsageError.

        classic_main([("m", [64], None), ("n", [64], None), ("k", None, [0, 256, 64])], **options)
    """
    found = [_sizes(*one) for one in sizes]
    device = find_device()
    device = find_device(device.kind, cuda_device) if device.kind in ("cuda", "rocm", "xpu") else device
    result = classic_search(
        found, dtype=dtype, device=device, iterations=num_iterations, warmup=num_warmup_iterations,
        output=output_file, verbose=verbose, notes=notes, heat=_WARM_CPU if device.kind == "cpu" else _WARM,
        ranges=" | ".join(f"{name}={list(listed or bounds or ())}" for name, listed, bounds in sizes),
    )  # fmt: skip
    return {"": 0 if result.means else 1, "SIGINT": 130, "SIGTERM": 143}.get(result.ended, 1)


def _sizes(name: str, listed: Sequence[int] | None, bounds: Sequence[int] | None) -> list[int]:
    """The sizes of m, n or k: as listed, or of a range, of which 0 is left out as ever."""
    if listed is None:
        start, stop, step = bounds or (0, 0, 1)
        if step < 1:
            raise UsageError(f"the step of --{name}_range is {step}", "START STOP STEP, with a STEP of 1 or more")
        listed = [one for one in range(start, stop, step) if one]
    if wrong := [one for one in listed if one < 1]:
        raise UsageError(f"--{name} has a size of {wrong[0]}", "sizes are 1 or more")
    return list(listed)
