"""dataloader_bench: samples a second by the settings of a DataLoader, and the smallest that are enough."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mldebug.core.errors import UsageError
from mldebug.perf.loader._limits import look
from mldebug.perf.loader._report import DataloaderReport


def dataloader_bench(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    batch_size: int | None = 32,
    step_seconds: float | None = None,
    shuffle: bool = True,
    num_workers: Sequence[int] | None = None,
    prefetch_factors: Sequence[int] = (2, 4),
    max_workers: int | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    multiprocessing_context: Any = None,
    device: str | None = None,
    seconds: float = 60.0,
    timeout: float = 30.0,
    progress: Callable[[str], object] | None = None,
) -> DataloaderReport:
    """Measure what a DataLoader over `dataset` delivers by its settings, and pick the smallest within 3% of the best.

    `dataset` is map-style, an IterableDataset, or a DataLoader, whose own samplers, batch size and collate_fn are then
    used. `step_seconds` is how long training takes for a batch: the best is then what feeds it. Counts of workers grow
    until they bring nothing, up to the CPUs of this rank, or further where workers wait for storage; `num_workers`
    names the counts to try. Batches are copied to `device` ("auto" for none given: the accelerator here, if any).
    It takes about `seconds`; a batch that takes longer than `timeout` is an error. Steady rates, in samples a second:
    whole waves of batches after the first one, in rounds that take turns, medians. A dataset that raises, and a worker
    that dies or hangs, is an MldebugError with the index; a wrong argument is a UsageError. Ctrl-C passes through with
    what was found as `.report`.

        report = dataloader_bench(dataset, batch_size=64, step_seconds=0.12)
        print(report.text()); loader = DataLoader(dataset, 64, num_workers=report.chosen.num_workers)
    """
    for name, value in (("seconds", seconds), ("timeout", timeout), ("step_seconds", step_seconds)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} is {value}", "it takes a number of seconds above 0")
    if num_workers is not None and (not num_workers or min(num_workers) < 0):
        raise UsageError(f"num_workers is {num_workers!r}", "it takes the counts to try, such as [0, 2, 4]")
    if not prefetch_factors or min(prefetch_factors) < 1:
        raise UsageError(f"prefetch_factors is {prefetch_factors!r}", "it takes numbers of 1 or more, such as [2, 4]")
    from mldebug.core.device import find_device
    from mldebug.perf.loader._run import Bench
    from mldebug.perf.loader._source import source_of

    source = source_of(dataset, collate_fn, batch_size, shuffle, worker_init_fn, multiprocessing_context)
    target = find_device(device or "auto")
    bench = Bench(source, target if target.kind != "cpu" else None, step_seconds, look(), seconds, timeout, progress)
    bench.counts, bench.prefetch = num_workers, tuple(prefetch_factors)
    bench.max_workers = max_workers
    with _random_states():
        try:
            bench.run()
        except KeyboardInterrupt as exc:
            exc.report = bench.report(interrupted=True)  # type: ignore[attr-defined]
            raise
    return bench.report()


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Loaders and transforms draw random numbers: the program goes on with those it would have had."""
    import torch

    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.random.get_rng_state(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.random.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
