"""What a loader costs an epoch beside its steps: the figure of the classic benchmarks, for settings in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from mldebug.core.device import Device
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._source import source_of
from mldebug.perf.loader._visit import How, visit


def epoch_overhead(
    dataset: Any, settings: Sequence[Setting], *, batch_size: int, step: float, rounds: int, device: Device | None
) -> dict[Setting, float]:
    """Seconds of an epoch in which training waits for its first batch, for each of the others and for their copies.

    Each batch is followed by `step` seconds of sleep. Medians of `rounds` measurements of the steady state, all
    settings in turns; the first batch is that of newly started workers, as at the start of each epoch.

        epoch_overhead(dataset, [Setting(0), Setting(2, 2)], batch_size=100, step=0.2, rounds=3, device=None)
    """
    source = source_of(dataset, None, batch_size, False, None, None)
    batches = max(1, len(dataset) // batch_size)
    seen: dict[Setting, list[float]] = {one: [] for one in settings}
    order, pick = list(settings), random.Random(0)
    for _ in range(rounds):
        for setting in order:
            window = step * max(3, batches // 2)
            how = How(window, time.perf_counter() + 600, 120.0, device, step)
            found = visit(source, setting, how)
            seen[setting].append(found.first + (batches - 1) * (statistics.mean(found.waits) + found.copy))
        pick.shuffle(order)
    return {one: statistics.median(times) for one, times in seen.items()}
