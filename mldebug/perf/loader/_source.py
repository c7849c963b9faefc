"""What is measured: a dataset with the way its samples are picked and put together, as loaders of any settings."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.utils.data as data

from mldebug.core.errors import UsageError
from mldebug.perf.loader._report import Setting
from mldebug.perf.loader._watched import Begin, Board, Watched, WatchedBatches, WatchedCollate, WatchedStream


@dataclass
class Source:
    """A dataset and what a DataLoader takes beside it. `indices` never ends, and goes on from one loader to the next,
    so that no measurement reads the samples of the one before out of the page cache; None for an iterable dataset."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batch_size: int | None
    indices: Iterator[Any] | None
    batched: bool  # whether `indices` gives lists
    worker_init_fn: Callable[[int], Any] | None = None
    context: Any = None
    now: Setting | None = None  # how the user's own loader is set

    def loader(self, setting: Setting, timeout: float) -> tuple[data.DataLoader[Any], Board, deque[int]]:
        """A loader whose failures can be looked up on the board; the deque has the sizes of batches to come."""
        board, sizes = Board(setting.num_workers), deque[int]()
        inner, kind = self.dataset, Watched
        if self.indices is None:
            dataset: Any = WatchedStream(inner, board)
        else:
            kind = WatchedBatches if callable(getattr(inner, "__getitems__", None)) else Watched
            dataset = kind(inner, board)
        options: dict[str, Any] = {"batch_size": self.batch_size}
        if self.indices is not None:
            picked = _Picked(self.indices, sizes if self.batched else None)
            options = {"batch_sampler": picked} if self.batched else {"batch_size": None, "sampler": picked}
        if setting.num_workers:
            options.update(
                prefetch_factor=setting.prefetch_factor,
                timeout=timeout,
                multiprocessing_context=self.context,
                worker_init_fn=Begin(self.worker_init_fn, board),
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than CPUs are tried on purpose
            loader: data.DataLoader[Any] = data.DataLoader(
                dataset,
                num_workers=setting.num_workers,
                collate_fn=WatchedCollate(self.collate_fn, board),
                pin_memory=setting.pin_memory,
                **options,
            )
        return loader, board, sizes


class _Picked:
    """The sampler of one loader: goes on with the common stream of indices."""

    def __init__(self, indices: Iterator[Any], sizes: deque[int] | None) -> None:
        self.indices, self.sizes = indices, sizes

    def __iter__(self) -> Iterator[Any]:
        for one in self.indices:
            if self.sizes is not None:
                self.sizes.append(len(one))
            yield one


def source_of(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int | None,
    shuffle: bool,
    worker_init_fn: Callable[[int], Any] | None,
    context: Any,
) -> Source:
    """From a DataLoader (all but the collate_fn is its own then), or from a dataset."""
    if isinstance(dataset, data.DataLoader):
        return _of_loader(dataset, collate_fn)
    streams = isinstance(dataset, data.IterableDataset)
    if not streams and not hasattr(dataset, "__getitem__"):
        if hasattr(dataset, "__iter__"):
            hint = "make it a subclass of torch.utils.data.IterableDataset"
            raise UsageError(f"{type(dataset).__name__} has no __getitem__, and is no IterableDataset", hint)
        raise UsageError(f"{type(dataset).__name__} is no dataset", "give a dataset with __getitem__, or a DataLoader")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}", "it takes 1 or more, or None where the dataset makes batches")
    utils = data._utils.collate
    collate = collate_fn or (utils.default_convert if batch_size is None else utils.default_collate)
    indices = None
    if not streams:
        if not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise UsageError(f"the dataset ({type(dataset).__name__}) has no samples", "len(dataset) must be above 0")
        indices = _own_indices(len(dataset), batch_size, shuffle)
    return Source(dataset, collate, batch_size, indices, batch_size is not None, worker_init_fn, context)


def _of_loader(loader: data.DataLoader[Any], collate_fn: Callable[[Any], Any] | None) -> Source:
    streams = isinstance(loader.dataset, data.IterableDataset)
    indices, batched = None, False
    if not streams:
        batched = loader.batch_sampler is not None
        indices = _endless(loader.batch_sampler if batched else loader.sampler)
    return Source(
        loader.dataset,
        collate_fn or loader.collate_fn,
        loader.batch_size,
        indices,
        batched,
        loader.worker_init_fn,
        loader.multiprocessing_context,
        Setting(
            loader.num_workers,
            (loader.prefetch_factor or 2) if loader.num_workers else 0,
            bool(loader.pin_memory),
            None,
            bool(loader.persistent_workers),
        ),
    )


def _endless(sampler: Any) -> Iterator[Any]:
    while True:
        empty = True
        for one in sampler:
            empty = False
            yield one
        if empty:
            hint = "see its arguments; one that can be iterated once only has no second epoch"
            raise UsageError("the sampler of this DataLoader picks no samples, or no more", hint)


def _own_indices(count: int, batch_size: int | None, shuffle: bool) -> Iterator[Any]:
    """In order, or drawn anew each time: a permutation of a large dataset would take long and much memory."""
    pick, at = random.Random(0), 0
    while True:
        size = 1 if batch_size is None else batch_size
        if shuffle:
            batch = [pick.randrange(count) for _ in range(size)]
        else:
            batch = [(at + step) % count for step in range(size)]
            at += size
        yield batch if batch_size is not None else batch[0]


def samples_in(batch: Any) -> int:
    """How many samples a batch has that the dataset made itself: the length of its first tensor or array."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for one in batch:
            if (found := samples_in(one)) > 1:
                return found
        return 1
    shape: Sequence[int] = getattr(batch, "shape", ())
    return int(shape[0]) if shape else 1
