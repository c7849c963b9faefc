"""What the page's map shows: a grid of bytes, tensors by batches, small enough to sit in the page."""

from __future__ import annotations

import base64
import json
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mldebug.numerics._history import spell_place
from mldebug.numerics.ring._stats import LIMIT

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._report import NumericsReport

ABSENT, NAN, INF, ZERO, FIRST = range(5)  # codes of a cell; from FIRST on the logarithm of abs max
LEVELS = 256 - FIRST
MAX_CELLS, MAX_COLUMNS = 2_000_000, 400  # one byte each before packing: what keeps the page below 3 MB
_NAME = 200  # characters of a name that are kept, from its end

LIMITS = {str(dtype).removeprefix("torch."): math.log2(limit) for dtype, limit in LIMIT.items()}


@dataclass(frozen=True)
class Grid:
    """abs max of each tensor in each batch.

    `codes` is a byte array of tensors (in order of execution) by batches; codes below FIRST are ABSENT, NAN, INF and
    ZERO, the others stand for 2 ** (low + (code - FIRST) * unit). `limits` is the logarithm to base 2 of the largest
    finite value of the dtype of each tensor, NaN where the dtype is not known. `event` is the (row, column) of the
    event's tensor, None where it is not in the grid; `total` counts the batches before the older ones were left out.
    """

    names: list[str]
    dtypes: list[str]
    batches: list[int]
    steps: list[int | None]
    codes: Any
    limits: Any
    low: float
    unit: float
    event: tuple[int, int] | None
    total: int

    def logs(self) -> Any:
        """Logarithms to base 2 of the finite values that are not 0, NaN elsewhere."""
        return np.where(self.codes >= FIRST, self.low + (self.codes.astype(np.float64) - FIRST) * self.unit, np.nan)

    def headroom(self) -> Any:
        """Powers of two between abs max and the largest value of the dtype, NaN where there is no number."""
        return self.limits[:, None] - self.logs()


def grid_of(report: NumericsReport) -> Grid | None:
    """The grid of a report's `series`; None if it has none.

    grid = grid_of(report)
    """
    names = list(report.series)
    every = sorted({batch for points in report.series.values() for batch, _ in points})
    if not every:
        return None
    batches = _window(every, len(names), report.event)
    column = {batch: i for i, batch in enumerate(batches)}
    values = np.full((len(names), len(batches)), -1.0)
    for row, points in zip(values, report.series.values(), strict=True):
        for batch, value in points:
            i = column.get(batch)
            if i is not None and not value <= row[i]:  # several calls in one batch: the worst; NaN stays
                row[i] = value if row[i] == row[i] else row[i]
    codes, low, unit = _coded(values)
    dtypes = [dtype if (dtype := report.dtypes.get(name, "")) in LIMITS else "" for name in names]
    return Grid(
        names=names,
        dtypes=dtypes,
        batches=batches,
        steps=[report.batch_steps.get(batch) for batch in batches],
        codes=codes,
        limits=np.array([LIMITS.get(dtype, math.nan) for dtype in dtypes]),
        low=low,
        unit=unit,
        event=_find(report.event, names, column),
        total=len(every),
    )


def _window(every: list[int], rows: int, event: Event | None) -> list[int]:
    """The batches that have room: the last ones, and if the event is older those around it."""
    room = max(min(MAX_CELLS // max(rows, 1), MAX_COLUMNS), 1)
    end = len(every)
    if event is not None and event.batch in every:
        end = min(end, max(every.index(event.batch) + 1 + room // 4, room))
    return every[max(end - room, 0) : end]


def _coded(values: Any) -> tuple[Any, float, float]:
    """(codes, low, unit) of abs max; -1 stands for what did not run."""
    codes = np.full(values.shape, ABSENT, dtype=np.uint8)
    codes[np.isnan(values)], codes[np.isinf(values)], codes[values == 0] = NAN, INF, ZERO
    finite = np.isfinite(values) & (values > 0)
    if not finite.any():
        return codes, 0.0, 1.0
    logs = np.log2(values[finite].astype(np.float64))
    low, high = float(logs.min()), float(logs.max())
    unit = max((high - low) / (LEVELS - 1), 2.0**-20)
    codes[finite] = FIRST + np.rint((logs - low) / unit).astype(np.uint8)
    return codes, low, unit


def _find(event: Event | None, names: list[str], column: dict[int, int]) -> tuple[int, int] | None:
    """The event's own tensor, or else the first of its module."""
    if event is None or event.batch not in column:
        return None
    own = spell_place(event.module, event.module_class, event.name)
    module = f"{event.module or event.module_class} "
    near = [name for name in names if name == own] or [name for name in names if name.startswith(module)]
    return (names.index(near[0]), column[event.batch]) if near else None


def packed(grid: Grid) -> str:
    """The grid as JSON for the page's script. It holds no `<`: names are in a packed block like the cells."""
    kinds = sorted(set(grid.dtypes))
    found = {
        "rows": len(grid.names),
        "batches": grid.batches,
        "steps": grid.steps,
        "low": grid.low,
        "unit": grid.unit,
        "event": grid.event,
        "kinds": [[kind, LIMITS.get(kind)] for kind in kinds],
        "cells": _block(grid.codes.tobytes()),
        "names": _block("\n".join(shown(name) for name in grid.names).encode()),
        "dtypes": _block(bytes(kinds.index(dtype) for dtype in grid.dtypes)),
    }
    return json.dumps(found, allow_nan=False)


def shown(text: str, most: int = _NAME) -> str:
    """A name in one line of printable signs; the end of a long one says more than its beginning."""
    text = text if len(text) <= most else f"...{text[3 - most :]}"
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _block(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()
