"""The part of the page with the map: pictures that need no script, what is nearest to its limit, and the map itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from mldebug.numerics.page._html_grid import packed, shown
from mldebug.numerics.page._html_picture import FAR, INF_COLOR, NAN_COLOR, SCALE, pictures, scale_of

if TYPE_CHECKING:
    from mldebug.numerics.page._html_grid import Grid

_NEAREST = 12  # rows of the table

_MAP = """\
<div id="map" hidden>
<div class="controls"><label><input type="radio" name="mode" value="absmax" checked> abs max</label>
<label><input type="radio" name="mode" value="headroom"> headroom</label>
<input type="search" id="filter" placeholder="part of a name" aria-label="filter by name" autocomplete="off">
<select id="order" aria-label="order"><option value="run">as executed</option>
<option value="near">least headroom first</option></select>
<button type="button" id="jump" hidden>go to the event</button> <span class="dim" id="count"></span></div>
<p class="readout" id="readout" aria-live="polite"></p>
<canvas id="axis"></canvas>
<div id="scroll" tabindex="0" role="application" aria-label="map of tensors and steps; arrow keys move">
<div id="space"><div id="pane"><div id="rows"></div><canvas id="cells"></canvas></div></div></div></div>"""


def map_section(grid: Grid) -> Iterator[str]:
    """The lines of the section for a grid; the script of the page finds its data in them."""
    least, most = scale_of(grid)
    absmax, headroom = pictures(grid)
    yield f"<h2>abs max and headroom: {len(grid.names)} tensors, {_batches(grid)}</h2>"
    yield '<p class="dim">Tensors from top to bottom as they are executed, batches from left to right.'
    yield "Headroom is the distance of abs max to the largest value of the dtype, in powers of two.</p>"
    low, high = (f"{2.0**end:.2g} (2<sup>{end:.0f}</sup>)" for end in (least, most))
    yield from _figure("absmax", "abs max", absmax, grid, low, high)
    yield from _figure("headroom", "headroom", headroom, grid, f"2<sup>{FAR}</sup> or more", "none left")
    yield '<p class="legend">'
    for color, sign in ((NAN_COLOR, "nan"), (INF_COLOR, "inf")):
        yield f'<span><i style="background:{color}"></i>{sign}</span>'
    yield '<span><i class="absent"></i>did not run, or dtype not known</span></p>'
    yield _MAP
    yield from _nearest(grid)
    look = {"scale": SCALE, "nan": NAN_COLOR, "inf": INF_COLOR, "far": FAR, "least": least, "most": most}
    yield f'<script type="application/json" id="map-data">{packed(grid)}</script>'
    yield f'<script type="application/json" id="map-look">{json.dumps(look)}</script>'


def _batches(grid: Grid) -> str:
    count = len(grid.batches)
    words = f"{count} batch{'es' if count > 1 else ''}"
    if grid.total > count:
        words += f" (of the {grid.total} that are known: {grid.batches[0]} to {grid.batches[-1]})"
    return words


def _figure(mode: str, title: str, url: str, grid: Grid, low: str, high: str) -> Iterator[str]:
    rows, columns = grid.codes.shape
    yield f'<figure data-mode="{mode}"><div class="picture"><img src="{url}" alt="{title} by tensor and batch">'
    if grid.event is not None:
        row, column = grid.event
        place = f"left:{100 * (column + 0.5) / columns:.2f}%;top:{100 * (row + 0.5) / rows:.2f}%"
        yield f'<span class="mark" style="{place}" title="the event"></span>'
    yield '<span class="now" hidden></span></div>'
    ring = ", the event in the ring" if grid.event is not None else ""
    bar = f"background:linear-gradient(90deg,{','.join(SCALE)})"
    yield f'<figcaption>{title}{ring}: {low}<i class="bar" style="{bar}"></i>{high}'
    yield "</figcaption></figure>"


def _nearest(grid: Grid) -> Iterator[str]:
    """The tensors whose finite values came nearest to the limit of their dtype."""
    room = grid.headroom()
    known = np.flatnonzero(~np.isnan(room).all(axis=1))
    if not len(known):
        return
    least = np.nanmin(room[known], axis=1)
    if least.min() >= FAR:
        yield f"<p>No finite value is within {FAR} powers of two of the largest value of its dtype.</p>"
        return
    order = [i for i in np.argsort(least, kind="stable")[:_NEAREST] if least[i] < FAR]
    yield "<h2>Nearest to the largest value of the dtype</h2>"
    yield '<div class="wide"><table><tr><th>tensor</th><th>dtype</th><th class="n">abs max</th>'
    yield '<th class="n">powers of two left</th><th class="n">step</th></tr>'
    for i in order:
        row = int(known[i])
        column = int(np.nanargmin(room[row]))
        absmax = 2.0 ** (float(grid.limits[row]) - float(least[i]))
        step = grid.steps[column]
        when = f"batch {grid.batches[column]}" if step is None else str(step)
        left = max(float(least[i]), 0.0)
        number = f"{absmax:.2g}" if math.isfinite(absmax) else "-"
        yield f"<tr><td>{escape(shown(grid.names[row]))}</td>"
        yield f'<td class="s">{escape(grid.dtypes[row])}</td>'
        yield f'<td class="n">{number}</td><td class="n">{left:.1f}</td><td class="n">{when}</td></tr>'
    yield "</table></div>"
