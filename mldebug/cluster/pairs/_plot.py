"""The pair matrix as a picture: each pair's share of what its siblings reach."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import FAILED
from mldebug.cluster.pairs._grid import Grid
from mldebug.core.errors import MldebugError
from mldebug.core.extras import how_to_install

_COLORS = {"hang": "#e3001b", "error": "#ff7f0e", "wrong": "#ff3fd0", "dead": "#000000"}
_NOTHING = "#e6e6e6"
_NAMED = 64  # GPUs: with more, only nodes have names


def pair_picture(cells: Grid, off: Any, title: str, path: str | os.PathLike[str]) -> None:
    """Draw the matrix as a PNG. Failed pairs have colours of their own; lines part the nodes.

    Raises MldebugError without matplotlib or where `path` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MldebugError("the heat map needs matplotlib", how_to_install("plot")) from error
    side = 4.5 + min(11.0, 0.12 * cells.size)
    figure = Figure(figsize=(side + 1.5, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_facecolor(_NOTHING)
    share = np.where(np.isfinite(cells.rate), 100 * np.exp(off), np.nan)
    image = axes.imshow(np.ma.masked_invalid(share), cmap="viridis", vmin=0, vmax=120, interpolation="nearest")
    _mark_failed(figure, axes, cells)
    _label(axes, cells)
    figure.colorbar(image, ax=axes, shrink=0.7, label="% of what siblings reach")
    figure.suptitle(textwrap.fill(title, int(side * 9)), fontsize=10, fontweight="bold", x=0.01, ha="left")
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MldebugError(
            f"cannot write {os.fspath(path)}: {reason}", "give a path in a folder that exists"
        ) from error


def _mark_failed(figure: Any, axes: Any, cells: Grid) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    patches = []
    for code, status in enumerate(FAILED, 1):
        where = cells.failed == code
        if where.any():
            layer = np.ma.masked_where(~where, np.ones(where.shape))
            axes.imshow(layer, cmap=ListedColormap([_COLORS[status]]), interpolation="nearest")
            patches.append(Patch(facecolor=_COLORS[status], label=status))
    if not cells.measured[~np.eye(cells.size, dtype=bool)].all():
        patches.append(Patch(facecolor=_NOTHING, label="not measured"))
    if patches:
        figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False)


def _label(axes: Any, cells: Grid) -> None:
    ends = np.flatnonzero(np.diff(cells.node)) + 0.5
    if cells.size <= _NAMED:
        axes.set_yticks(range(cells.size), cells.names, fontsize=6)
        axes.set_xticks(range(cells.size), cells.names, fontsize=6, rotation=90)
    else:
        middles = [float(cells.members(node).mean()) for node in range(len(cells.hosts))]
        step = max(1, len(middles) // 40)
        axes.set_yticks(middles[::step], cells.hosts[::step], fontsize=6)
        axes.set_xticks(middles[::step], cells.hosts[::step], fontsize=6, rotation=90)
    if len(ends) < 32:
        for end in ends:
            axes.axhline(end, color="white", linewidth=0.6)
            axes.axvline(end, color="white", linewidth=0.6)
    axes.set_xlabel("to", fontsize=8)
    axes.set_ylabel("from", fontsize=8)
