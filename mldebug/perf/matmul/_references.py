"""What others measured as the most that matrix products reach: a table with sources that comes with the package."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from mldebug.perf.matmul._peaks import accelerator, canonical_dtype

# How a figure was found. They do not compare: pauses between the products let a card clock higher.
METHODS = {
    "flushed": "best of many shapes, mean of 100 products with the cache flushed between them",
    "sustained": "products without a pause until power and clock are steady",
    "profiler": "CUTLASS profiler",
    "one shape": "one shape, torch.mm",
}


@dataclass(frozen=True)
class MamfReference:
    """One measured figure. `method` is a key of METHODS, `shape` (m, n, k) where it is stated."""

    accelerator: str
    dtype: str
    method: str
    tflops: float
    shape: tuple[int, int, int] | None
    approximate: bool
    versions: str
    notes: str
    source: str


def mamf_references(device_name: str, dtype: str, method: str = "") -> tuple[MamfReference, ...]:
    """What was measured on this kind of device in this dtype, by `method` or any, the nearest first.

    Nearest is the one of the same memory size, then the order of METHODS. Empty where nothing is known.

        mamf_references("NVIDIA H100 80GB HBM3", "bf16", "flushed")[0].tflops  # 794.5
    """
    kind = accelerator(device_name)
    if kind is None:
        return ()
    dtype = canonical_dtype(dtype)
    found = [
        row
        for row, name in _table()
        if name == kind.name and row.dtype == dtype and (not method or row.method == method)
    ]
    order = list(METHODS)
    size = _memory(device_name)
    found.sort(key=lambda row: (bool(size) and _memory(row.accelerator) not in ("", size), order.index(row.method)))
    return tuple(found)


def known_shapes(dtype: str = "bfloat16") -> tuple[tuple[int, int, int], ...]:
    """The (m, n, k) that were best on some device, in this dtype first: where a search may begin.

    known_shapes("float8_e4m3fn")[0]
    """
    dtype = canonical_dtype(dtype)
    rows = sorted((row for row, _ in _table()), key=lambda row: row.dtype != dtype)
    return tuple(dict.fromkeys(row.shape for row in rows if row.shape is not None))


@functools.cache
def _table() -> tuple[tuple[MamfReference, str], ...]:
    """The rows, each with the name of its accelerator in the table of peaks."""
    with (Path(__file__).with_name("mamf_reference.csv")).open(encoding="utf-8", newline="") as file:
        rows = [_reference(row) for row in csv.DictReader(file)]
    return tuple((row, kind.name) for row in rows if (kind := accelerator(row.accelerator)) is not None)


def _reference(row: dict[str, str]) -> MamfReference:
    m, n, k = (int(size) for size in row["shape"].split("x")) if row["shape"] else (0, 0, 0)
    return MamfReference(
        accelerator=row["accelerator"],
        dtype=row["dtype"],
        method=row["method"],
        tflops=float(row["tflops"]),
        shape=(m, n, k) if m else None,
        approximate=row["approximate"] == "yes",
        versions=row["versions"],
        notes=row["notes"],
        source=row["source"],
    )


def _memory(name: str) -> str:
    """`40gb` of `NVIDIA A100-SXM4-40GB`."""
    return next((word for word in name.lower().replace("-", " ").split() if word.endswith("gb")), "")
