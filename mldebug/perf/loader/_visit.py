"""One measurement of one setting: start the workers, let the first wave pass, time whole waves, end the workers."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data as data

from mldebug.core.device import Device
from mldebug.core.errors import UsageError
from mldebug.perf.loader._failure import explain, kill_workers
from mldebug.perf.loader._limits import cpu_seconds, memory_of, queued_seconds, tensor_bytes
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._source import Source, samples_in


@dataclass
class Visit:
    """What was seen. `rate` in samples a second, 0 where time ran out first; `waits` in seconds for each batch."""

    first: float = 0.0
    rate: float = 0.0
    batches: int = 0
    samples: float = 0.0  # in a batch
    nbytes: int = 0
    cpu: float | None = None  # how much of a CPU each worker used
    queued: float = 0.0  # how much more each would have used, had there been CPUs
    memory: int | None = None  # bytes of a worker
    copy: float = 0.0  # seconds a batch that the device was waited for or copied to
    waits: list[float] = field(default_factory=list)
    alike: bool = False  # whether the workers of a stream all yield the same


@dataclass(frozen=True)
class How:
    """`window` seconds are measured if there is time until `deadline`; no batch may take longer than `timeout`.
    With `step` that long is slept after each batch, as training would take it."""

    window: float
    deadline: float
    timeout: float
    device: Device | None = None
    step: float = 0.0


def visit(source: Source, setting: Setting, how: How) -> Visit:
    """Measure one setting with workers. Raises MldebugError where the dataset or a worker fails."""
    loader, board, sizes = source.loader(setting, how.timeout)
    found = Visit()
    began = time.perf_counter()
    workers: Iterator[Any] | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            workers = iter(loader)
            pids = [one.pid for one in getattr(workers, "_workers", ())]
            _watch(workers, pids, setting, how, found, began, sizes)
            if not found.first and time.perf_counter() < how.deadline:  # it has come to its end
                raise UsageError(
                    f"the dataset ({type(source.dataset).__name__}) gives no samples",
                    "iterate it alone; its __iter__ has to begin anew each time",
                )
            found.alike = source.indices is None and board.all_alike()
    except Exception as exc:
        failure = explain(exc, workers, board, setting, how.timeout, source.indices is None)
        kill_workers(workers)
        raise failure from exc
    except BaseException:
        kill_workers(workers)
        raise
    finally:
        end_workers(workers)
    return found


def end_workers(workers: Any) -> None:
    """End the workers now, and not when the garbage collector comes by."""
    shut = getattr(workers, "_shutdown_workers", None)
    if shut is not None:
        with contextlib.suppress(RuntimeError):  # torch tells once more of a worker that was killed
            shut()


def _watch(
    workers: Iterator[Any], pids: list[int], setting: Setting, how: How, found: Visit, began: float, sizes: deque[int]
) -> None:
    wave = max(1, setting.num_workers)
    # The queue that fills during a slept step must have been used up before waiting shows.
    skip = wave * (setting.prefetch_factor or 1) + 2 if how.step else wave
    samples, start, cpu_before, queued, copies = 0.0, 0.0, 0.0, 0.0, 0.0
    asked = time.perf_counter()
    for count, batch in enumerate(workers, 1):
        arrived = time.perf_counter()
        size = sizes.popleft() if sizes else samples_in(batch)
        if count == 1:
            found.first, found.nbytes = arrived - began, tensor_bytes(batch)
        measured = count - skip
        if measured > 0:
            samples += size
            found.waits.append(arrived - asked)
        if how.device is not None:
            batch = to_device(batch, how.device.torch_device, bool(setting.non_blocking))
            copies += time.perf_counter() - arrived if measured > 0 else 0.0
        now = time.perf_counter()
        whole = measured > 0 and measured % wave == 0
        late = now >= how.deadline or (measured > 0 and now - start > 4 * how.window)
        if measured == 0:
            _wait_for(how.device)
            start, cpu_before, queued = time.perf_counter(), cpu_seconds(pids), queued_seconds(pids)
        elif measured > 0 and ((whole and now - start >= how.window) or late):
            _wait_for(how.device)
            seconds = time.perf_counter() - start
            found.batches, found.rate, found.samples = measured, samples / seconds, samples / measured
            found.copy = copies / measured
            if pids:
                found.cpu = (cpu_seconds(pids) - cpu_before) / seconds / len(pids)
                found.queued = (queued_seconds(pids) - queued) / seconds / len(pids)
                total = memory_of(pids)
                found.memory = total // len(pids) if total is not None else None
            return
        elif late:
            return
        if how.step:
            time.sleep(how.step)
        asked = time.perf_counter()


def _wait_for(device: Device | None) -> None:
    if device is not None:
        device.synchronize()


def to_device(batch: Any, device: Any, non_blocking: bool) -> Any:
    """A batch with its tensors on the device; other things stay as they are."""
    if callable(getattr(batch, "to", None)):  # tensors, and batches of transformers and PyG
        try:
            return batch.to(device, non_blocking=non_blocking)
        except TypeError:
            return batch.to(device)
    if isinstance(batch, dict):
        return {key: to_device(one, device, non_blocking) for key, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(one, device, non_blocking) for one in batch]
    return batch


def copy_seconds(nbytes: int, device: Device, rounds: int = 5) -> float:
    """How long it takes to copy as many bytes in the ordinary way, as the main process does without workers."""
    import torch

    batch, times = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(rounds):
        began = time.perf_counter()
        to_device(batch, device.torch_device, False)
        device.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def epoch_start(source: Source, setting: Setting, how: How) -> float | None:
    """Seconds from the start of an epoch to its first batch where the workers stay (persistent_workers)."""
    if source.indices is None or not setting.num_workers:
        return None
    loader, board, _ = source.loader(setting, how.timeout)
    few = [next(source.indices) for _ in range(2 * setting.num_workers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than CPUs are tried on purpose
        again: Any = data.DataLoader(
            loader.dataset, collate_fn=loader.collate_fn, worker_init_fn=loader.worker_init_fn,
            num_workers=setting.num_workers, prefetch_factor=setting.prefetch_factor, persistent_workers=True,
            timeout=how.timeout, multiprocessing_context=source.context, pin_memory=setting.pin_memory,
            **({"batch_sampler": few} if source.batched else {"batch_size": None, "sampler": few}),
        )  # fmt: skip
    workers: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            workers = iter(again)
            for _ in workers:
                pass
            began = time.perf_counter()
            workers = iter(again)
            next(workers)
            return time.perf_counter() - began
    except Exception as exc:
        failure = explain(exc, workers, board, setting, how.timeout, False)
        kill_workers(workers)
        raise failure from exc
    except BaseException:
        kill_workers(workers)
        raise
    finally:
        end_workers(workers)
