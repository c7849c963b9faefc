"""measure(): the sustained rates of given shapes, side by side."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mldebug.core.device import Device, find_device
from mldebug.perf.matmul._blocks import Shape
from mldebug.perf.matmul._candidates import limits_for, reference_shape
from mldebug.perf.matmul._search import Search, mean_rate, settle, warm_up


def measure(
    shapes: Sequence[Shape], *, dtype: str = "bfloat16", device: Device | None = None, seconds: float | None = None
) -> dict[Shape, float]:
    """TFLOPS of each shape, (m, n, k) or (m, n, k, batch), under load and at the clock of a reference beside it.

    Rounds over all of them in random order for about `seconds` (by default 5, or 0.2 a shape), after a warm-up. A shape
    that fails, as for want of memory, is left out. Raises UsageError for a dtype that the device does not have.

        measure([(4096, 4096, 4096, 1)])[4096, 4096, 4096, 1]
    """
    from mldebug.perf.matmul._formats import find_format
    from mldebug.perf.matmul._machine import TorchMachine, first_rate, may_fit

    device = device or find_device()
    device.set_current()
    form = find_format(device, dtype)
    rate = first_rate(form)
    reference = reference_shape(limits_for(rate, device.kind))
    seconds = seconds if seconds is not None else max(5.0, 0.2 * len(shapes))
    likely = [shape for shape in shapes if may_fit(form, shape)]
    with TorchMachine(form, shapes=[*likely, reference], tflops=rate, seed=1) as machine:
        search = Search(machine, reference, rng=random.Random(1), note=_ignore, neighbours=lambda shape: [])
        search.touch([reference, *shapes])
        warm_up(machine, reference, 0.1 * seconds, machine.now() + 0.3 * seconds, _ignore)
        until = machine.now() + 0.6 * seconds
        rounds = 0
        while rounds < 2 or machine.now() < until:
            rounds += 1
            search.each(shapes, "measure")
        unit = mean_rate(settle(machine, reference, 0.1 * seconds, _ignore))
    found = {one.shape: one.share * unit for one in search.ranking()}
    if reference in shapes:
        found[reference] = unit
    return {shape: found[shape] for shape in shapes if shape in found}


def _ignore(*_: object) -> None:
    pass
