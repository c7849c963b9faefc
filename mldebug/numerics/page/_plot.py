"""The picture of a report: abs max of every tensor over the batches, the last ones before the event."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mldebug.core.errors import MldebugError
from mldebug.core.extras import how_to_install
from mldebug.numerics._history import spell_place

if TYPE_CHECKING:
    from mldebug.numerics._event import Event
    from mldebug.numerics._report import NumericsReport

MAX_ROWS = 200  # above it the labels can no longer be read
_INF, _NAN, _NOTHING = "#e3001b", "#ff3fd0", "#e6e6e6"
_DECADES = 6  # of the colour scale below its upper end; zeros and all that is smaller share the darkest colour
_MANY = 25  # batches: from here on cells have no borders


@dataclass
class _Row:
    """One line of the picture: a tensor, or neighbours that had to share a line."""

    label: str
    values: Any  # float array over the columns; NaN where the tensor was NaN
    there: Any  # bool array: whether the tensor was made in that batch
    is_event: bool = False


def heat_map(report: NumericsReport, path: str | os.PathLike[str]) -> None:
    """Draw `report.series` as a PNG: tensors in order of execution, batches to the right, colour for abs max.

    inf and NaN have colours of their own, the tensor of the event is framed. More than 200 tensors share lines, the
    tensor of the event never does. Raises MldebugError without matplotlib, without data, or where `path` cannot be
    written.

        heat_map(report, "absmax.png")
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MldebugError("the heat map needs matplotlib", how_to_install("plot")) from error
    batches = sorted({batch for points in report.series.values() for batch, _ in points})
    if not batches:
        raise MldebugError("there is nothing to draw: no forward was recorded", "run at least one batch before plot()")
    rows = _fewer(_rows(report, batches))
    width = 5.5 + min(max(0.16 * len(batches), 3.0), 10.0)
    figure = Figure(figsize=(width, 2.2 + 0.135 * max(len(rows), 12)), layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure, rows, batches, report)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MldebugError(
            f"cannot write {os.fspath(path)}: {reason}", "give a path in a folder that exists"
        ) from error


def _rows(report: NumericsReport, batches: Sequence[int]) -> list[_Row]:
    column = {batch: i for i, batch in enumerate(batches)}
    wanted = _place_of(report.event)
    rows = []
    for place, points in report.series.items():
        values, there = np.zeros(len(batches)), np.zeros(len(batches), dtype=bool)
        for batch, value in points:  # several where a module runs more than once in a forward
            i = column[batch]
            values[i] = np.maximum(values[i], value)  # NaN wins
            there[i] = True
        rows.append(_Row(place, values, there, is_event=place == wanted))
    return rows


def _place_of(event: Event | None) -> str:
    """The key of the event's tensor in `series`."""
    if event is None:
        return ""
    return spell_place(event.module, event.module_class, event.name)


def _fewer(rows: list[_Row]) -> list[_Row]:
    """At most MAX_ROWS lines: modules that hand on the line before go first, then neighbours share a line."""
    if len(rows) <= MAX_ROWS:
        return rows
    kept: list[_Row] = []
    for row in rows:
        if kept and not row.is_event and np.array_equal(row.values, kept[-1].values, equal_nan=True):
            continue
        kept.append(row)
    size = 1
    while len(groups := _groups(kept, size)) > MAX_ROWS:
        size += 1
    return [_merge(group) for group in groups]


def _groups(rows: list[_Row], size: int) -> list[list[_Row]]:
    """Neighbours in groups of `size`; the row of the event stays alone."""
    groups: list[list[_Row]] = []
    for row in rows:
        last = groups[-1] if groups else None
        if last is not None and len(last) < size and not row.is_event and not last[-1].is_event:
            last.append(row)
        else:
            groups.append([row])
    return groups


def _merge(group: list[_Row]) -> _Row:
    if len(group) == 1:
        return group[0]
    values = np.max([np.where(row.there, row.values, 0.0) for row in group], axis=0)  # NaN wins
    there = np.any([row.there for row in group], axis=0)
    return _Row(f"{_short(group[0].label)} and {len(group) - 1} more", values, there)


def _draw(figure: Any, rows: list[_Row], batches: Sequence[int], report: NumericsReport) -> None:
    from matplotlib.colors import ListedColormap

    axes = figure.add_subplot()
    values = np.array([row.values for row in rows])
    there = np.array([row.there for row in rows])
    finite = there & np.isfinite(values)
    logs = np.log10(np.maximum(np.where(finite, values, 1.0), np.finfo(float).tiny))
    least, most = _range(logs[finite & (values > 0)], report.event)
    many = len(batches) >= _MANY
    lines: dict[str, Any] = {"edgecolors": "none" if many else "white", "linewidth": 0 if many else 0.5}
    mesh = axes.pcolormesh(np.ma.masked_where(~finite, logs), cmap="viridis", vmin=least, vmax=most, **lines)
    axes.set_facecolor(_NOTHING)
    for where, color in ((there & np.isinf(values), _INF), (there & np.isnan(values), _NAN)):
        if where.any():
            axes.pcolormesh(np.ma.masked_where(~where, np.ones_like(values)), cmap=ListedColormap([color]), **lines)
    axes.invert_yaxis()  # the first module on top
    _label(axes, rows, batches)
    _frame_event(axes, rows, batches, report.event)
    _explain(figure, axes, mesh, report.event, there, values)
    wrap = int(figure.get_figwidth() * 10)
    figure.suptitle(
        textwrap.fill(report.verdict, wrap), fontsize=12, fontweight="bold", x=0.01, horizontalalignment="left"
    )


def _range(logs: Any, event: Event | None) -> tuple[float, float]:
    """The ends of the colour scale. The limit of a narrow dtype is the upper end, where values come near it."""
    if not logs.size:
        return 0.0, 1.0
    least, most = float(logs.min()), float(logs.max())
    if event is not None and math.isfinite(event.limit) and most > math.log10(event.limit) - 3:
        most = max(most, math.log10(event.limit))
    least = max(least, most - _DECADES)
    return (least, most) if most > least else (least - 1.0, most + 1.0)


def _label(axes: Any, rows: list[_Row], batches: Sequence[int]) -> None:
    axes.set_yticks(np.arange(len(rows)) + 0.5, [_short(row.label) for row in rows], fontsize=6.5, family="monospace")
    axes.tick_params(axis="y", length=0, pad=2)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row.is_event:
            label.set(color=_INF, fontweight="bold")
    step = max(1, math.ceil(len(batches) / 16))
    shown = range((len(batches) - 1) % step, len(batches), step)  # the last one always
    axes.set_xticks([i + 0.5 for i in shown], [str(batches[i]) for i in shown], fontsize=8)
    axes.set_xlabel("batch (forward call of the model)", fontsize=9)
    axes.set_ylabel("tensors in order of execution", fontsize=9)


def _short(label: str) -> str:
    """The end of a long name says more than its beginning."""
    label = label.removesuffix(" output") if " " in label else label
    return label if len(label) <= 64 else f"…{label[-63:]}"


def _frame_event(axes: Any, rows: list[_Row], batches: Sequence[int], event: Event | None) -> None:
    from matplotlib.patches import Rectangle

    found = next((i for i, row in enumerate(rows) if row.is_event), None)
    if event is None:
        return
    if event.batch in batches:
        column = list(batches).index(event.batch)
        top, height = (0, len(rows)) if found is None else (found, 1)
        axes.add_patch(Rectangle((column, top), 1, height, fill=False, edgecolor="black", linewidth=1.6, zorder=5))
    if found is not None:
        axes.annotate(
            event.kind, (1.0, found + 0.5), xycoords=axes.get_yaxis_transform(), xytext=(14, 0),
            textcoords="offset points", va="center", fontsize=8, fontweight="bold", color=_INF,
            arrowprops={"arrowstyle": "->", "color": _INF}, annotation_clip=False,
        )  # fmt: skip


def _explain(figure: Any, axes: Any, mesh: Any, event: Event | None, there: Any, values: Any) -> None:
    """The colour bar with the dtype's limit, and a legend for the other colours that occur."""
    from matplotlib.patches import Patch

    height = figure.get_figheight()
    bar = figure.colorbar(mesh, ax=axes, shrink=min(1.0, 4.0 / height), anchor=(0.0, 1.0), pad=0.02, extend="min")
    vmin, vmax = mesh.norm.vmin, mesh.norm.vmax
    low, high = math.ceil(vmin), math.floor(vmax)
    ticks = list(range(low, high + 1)) if high - low > 1 else list(np.linspace(vmin, vmax, 4))
    names = [f"{10.0**tick:.2g}" if high - low <= 1 else f"1e{tick}" for tick in ticks]
    if event is not None and math.isfinite(event.limit) and math.isclose(vmax, math.log10(event.limit)):
        ticks = [*(tick for tick in ticks if tick < vmax - 0.4), vmax]
        names = [*names[: len(ticks) - 1], f"{event.limit:.4g}, the\nlimit of {event.dtype}"]
    bar.set_ticks(ticks, labels=names)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("abs max", fontsize=9)
    kinds = (
        (_INF, "inf", (there & np.isinf(values)).any()),
        (_NAN, "nan", (there & np.isnan(values)).any()),
        (_NOTHING, "did not run", (~there).any()),
    )
    patches = [Patch(facecolor=color, label=name) for color, name, seen in kinds if seen]
    if patches:
        figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=9, frameon=False)
