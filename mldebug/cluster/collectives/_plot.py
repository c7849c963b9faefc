"""busbw by payload as a picture."""

from __future__ import annotations

import io
from typing import Any

from mldebug.cluster.collectives._table import size_text
from mldebug.core.errors import MldebugError
from mldebug.core.extras import how_to_install


def picture(evidence: dict[str, Any]) -> bytes:
    """busbw by size, or by call for one size, as PNG. MldebugError without matplotlib."""
    figure = drawing()(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    if evidence["stability"]:
        axes.plot(evidence["stability"]["busbw"])
        axes.set_xlabel(f"call ({size_text(evidence['stability']['bytes'])})")
    else:
        _lines(axes, evidence["rows"])
    axes.set_ylabel("busbw (GBps)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(f"{evidence['world']} x {evidence['gpu']}, {evidence['backend']} {evidence['nccl']}", fontsize=10)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    return drawn.getvalue()


def drawing() -> Any:
    """matplotlib's Figure, which opens no window. MldebugError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MldebugError("the plot needs matplotlib", how_to_install("plot")) from error
    return Figure


def _lines(axes: Any, rows: list[dict[str, Any]]) -> None:
    names: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for place in ("out_of_place", "in_place"):
            if place in row:
                name = f"{row['collective']} {row['dtype']} {place.replace('_', ' ')}"
                names.setdefault(name, []).append((row["bytes"], row[place]["busbw"]))
    sizes = sorted({row["bytes"] for row in rows})
    for name, points in names.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    shown = sizes[:: max(1, len(sizes) // 12)]
    axes.set_xticks(shown, [size_text(size) for size in shown], rotation=45, ha="right", fontsize=7)
    axes.set_xlabel("size")
    if names:
        axes.legend(fontsize=7)
