"""The DataLoader of somebody's script: found as the script iterates it, timed for a few steps, then measured."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.perf.loader._report import DataloaderReport

_WARM = 3  # steps that compile and allocate, and do not count


class LoaderMeasured(SystemExit):
    """Ends the script in the place of its training: frameworks let it through, and `finally` blocks run."""


class ScriptLoader:
    """While entered, DataLoader of this process is watched. The one with number `which` (from 0, in the order in which
    they are first iterated) runs `steps` steps of the script's own, which says how long a step is, and is then given to
    `bench` with that time (None: not known). `report` or `failure` has what came of it.

        with ScriptLoader(bench, steps=20) as watched:
            run_script(["train.py"])
    """

    def __init__(self, bench: Callable[[Any, float | None], DataloaderReport], steps: int, which: int = 0) -> None:
        self.bench, self.steps, self.which = bench, steps, which
        self.report: DataloaderReport | None = None
        self.failure: MldebugError | None = None
        self.loader: Any = None
        self._order: list[Any] = []  # the loaders themselves: an id may be given again
        self._times: list[float] = []
        self._busy = False

    def __enter__(self) -> ScriptLoader:
        import torch.utils.data as data

        self._original: Any = data.DataLoader.__iter__
        watched, original = self, self._original

        def iterate(loader: Any) -> Iterator[Any]:
            return watched._iterate(loader, original)

        data.DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        self._installed = iterate
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        import torch.utils.data as data

        if data.DataLoader.__iter__ is self._installed:  # else somebody has patched over it, and calls ours
            data.DataLoader.__iter__ = self._original  # type: ignore[method-assign]
        self._busy = True

    @property
    def seen(self) -> int:
        """How many DataLoaders were iterated."""
        return len(self._order)

    @property
    def measured(self) -> bool:
        return self.report is not None or self.failure is not None

    def finish(self, workers: Any = None) -> None:
        """Measure the loader now; its own workers are ended first, so that they take nothing from the others."""
        from mldebug.perf.loader._visit import end_workers

        self._busy = True
        end_workers(workers)
        try:
            self.report = self.bench(self.loader, self.step_seconds)
        except KeyboardInterrupt as exc:
            self.report = getattr(exc, "report", None)
            raise LoaderMeasured(130) from None
        except MldebugError as exc:
            self.failure = exc

    @property
    def step_seconds(self) -> float | None:
        """The median of the steps after the first ones, without what they waited for data."""
        import statistics

        warm = self._times[min(_WARM, len(self._times) // 2) :]
        return statistics.median(warm) if warm else None

    def _iterate(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        if self._busy:
            if self.measured:  # the script caught the end that it was given
                raise _end_of_training()
            return original(loader)
        if not any(one is loader for one in self._order):
            self._order.append(loader)
        if self.which >= len(self._order) or self._order[self.which] is not loader:
            return original(loader)
        self.loader = loader
        if self.steps == 0:
            self._end(None)
        return _Timed(self, original(loader))

    def _end(self, workers: Any) -> None:
        self.finish(workers)
        raise _end_of_training()

    def _failed(self, workers: Any) -> None:
        """The loader failed in the script's own steps: measured anew it fails alike, and the sample is known then.
        Where it does not, the script's error is all there is."""
        self.finish(workers)
        if self.failure is not None:
            raise _end_of_training()
        self.report = None

    def _step(self, seconds: float, workers: Any) -> None:
        self._times.append(seconds)
        if len(self._times) >= self.steps:
            self._end(workers)


class _Timed:
    """The iterator of a loader; what passes between two batches is a step."""

    def __init__(self, watched: ScriptLoader, inner: Iterator[Any]) -> None:
        self._watched, self._inner = watched, inner
        self._given: float | None = None

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        if self._watched._busy:
            return next(self._inner)
        if self._given is not None:
            _synchronize()  # what the step has sent to the device belongs to it
            self._watched._step(time.perf_counter() - self._given, self._inner)
        try:
            value = next(self._inner)
        except StopIteration:
            if self._given is not None:
                self._watched._end(self._inner)  # an epoch of fewer steps
            raise
        except Exception:
            self._watched._failed(self._inner)
            raise
        self._given = time.perf_counter()
        return value

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _end_of_training() -> SystemExit:
    """What ends the script: a thread ends without a word by SystemExit itself alone."""
    return LoaderMeasured(0) if threading.current_thread() is threading.main_thread() else SystemExit(0)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            module.synchronize()
