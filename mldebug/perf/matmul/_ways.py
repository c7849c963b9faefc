"""Two other ways to time a shape: the first milliseconds after idling, and the classic one with flushes in between."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mldebug.core.device import Mark, seconds_between
from mldebug.perf.matmul._blocks import Shape, flops_of
from mldebug.perf.matmul._machine import TorchMachine

FLUSH_BYTES = 256 << 20  # more than any cache has
_SLOWEST_MEMORY = 1e12  # bytes a second
_MOMENT = 5e-3  # seconds that count as a burst


def burst(machine: TorchMachine, shape: Shape, times: int = 3, idle: float = 0.3) -> float:
    """TFLOPS in the first 5 ms after `idle` seconds of nothing: before power and temperature pull the clock down.

    The median of `times` tries. It is what a single kernel between pauses gets, and no rate that can be held.
    """
    calls = machine.calls(shape)
    counted = max(1, round(_MOMENT / machine.seconds_of(shape)))
    rates = []
    for number in range(times):
        time.sleep(idle)
        calls[number % len(calls)]()  # wakes it, and gives the host a start
        first = machine.device.mark()
        for turn in range(counted):
            calls[turn % len(calls)]()
        last = machine.device.mark()
        machine.wait(last)
        rates.append(flops_of(shape) * counted / seconds_between(first, last) / 1e12)
    return statistics.median(rates)


def flushed(
    machine: TorchMachine, shape: Shape, iterations: int = 60, warmup: int = 20, flush_bytes: int = FLUSH_BYTES
) -> list[float]:
    """Seconds of each call, the cache flushed and the product's memory written before each, which does not count.

    That is how classic finders measure. The pauses let the card cool and clock higher than it can in a training step.
    """
    m, n = shape[:2]
    device = machine.device.torch_device
    call = machine.calls(shape)[0]
    flush = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device)
    product = machine.out[: m * n]
    other = torch.empty_like(product).copy_(torch.randn(m * n, device=device)) if product.is_floating_point() else None
    marks: list[tuple[Mark, Mark]] = []
    for _ in range(warmup + iterations):
        flush.zero_()
        if other is not None:
            product.copy_(other)
        first = machine.device.mark()
        call()
        marks.append((first, machine.device.mark()))
    machine.wait(marks[-1][1])
    return [seconds_between(first, last) for first, last in marks[warmup:]]


def flushed_rate(machine: TorchMachine, shape: Shape, seconds: float = 0.6, flush_bytes: int = FLUSH_BYTES) -> float:
    """TFLOPS by `flushed`, as the mean of calls for about `seconds` after as long for the clock to settle."""
    first = flushed(machine, shape, 3, 1, flush_bytes)
    gap = flush_bytes * 2 / _SLOWEST_MEMORY  # the flush and the copy; at least this fast where it matters
    count = max(5, int(seconds / (min(first) + gap)))
    times = flushed(machine, shape, count, count, flush_bytes)
    return flops_of(shape) / statistics.fmean(times) / 1e12


def without_room(measure: Callable[[], float], machine: TorchMachine) -> float | None:
    """What `measure` returns, or None where there is no memory left for it."""
    try:
        return measure()
    except (RuntimeError, MemoryError) as exc:
        machine.failure(exc)
        return None
