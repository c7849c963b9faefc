"""The map as a small PNG, for the overview and for browsers without scripts, and the colours of both."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mldebug.numerics.page._html_grid import ABSENT, INF, NAN

if TYPE_CHECKING:
    from mldebug.numerics.page._html_grid import Grid

# Ten of the colours of viridis, https://bids.github.io/colormap: even in lightness, for all kinds of sight.
SCALE = ("#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
INF_COLOR, NAN_COLOR = "#e3001b", "#ffb3ff"  # far from every colour of the scale, for all kinds of sight too
FAR = 16  # powers of two of headroom from which all is the same colour: float16 holds 1 with 16 to spare
RANGE = 24  # powers of two that the scale of abs max spans, below its largest value
_LINES = 300  # of the picture; neighbours share one, the worst of them is seen
_SHADES = 253


def pictures(grid: Grid) -> tuple[str, str]:
    """(abs max, headroom) as data URLs of PNG pictures; transparent where there is nothing to show."""
    bad = _badness(grid.codes)
    known = np.where((bad == 1) & np.isnan(grid.limits)[:, None], 0, bad)
    least, most = scale_of(grid)
    logs = grid.logs()
    size = _fewer_lines(np.nan_to_num((logs - least) / (most - least), nan=-1.0))
    near = _fewer_lines(np.nan_to_num(1.0 - grid.headroom() / FAR, nan=-1.0))
    return _url(_fewer_lines(bad), size), _url(_fewer_lines(known), near)


def scale_of(grid: Grid) -> tuple[float, float]:
    """The ends of the scale of abs max, as powers of two."""
    logs = grid.logs()
    if np.isnan(logs).all():
        return 0.0, 1.0
    least, most = float(np.nanmin(logs)), float(np.nanmax(logs))
    least = max(least, most - RANGE)
    return (least, most) if most - least > 0.5 else (least - 1.0, most + 1.0)


def _badness(codes: Any) -> Any:
    """0 did not run, 1 fine, 2 inf, 3 NaN."""
    found = np.ones(codes.shape, dtype=np.uint8)
    found[codes == ABSENT], found[codes == INF], found[codes == NAN] = 0, 2, 3
    return found


def _fewer_lines(values: Any) -> Any:
    """At most _LINES lines: each the maximum of as many neighbours as all others."""
    share = -(-len(values) // _LINES)
    starts = np.arange(0, len(values), share)
    return np.maximum.reduceat(values, starts, axis=0)


def _url(worst: Any, part: Any) -> str:
    """A PNG with a palette: 0 transparent, 1 inf, 2 NaN, the rest the scale."""
    pixels = (3 + np.rint(np.clip(part, 0.0, 1.0) * (_SHADES - 1))).astype(np.uint8)
    pixels[worst == 0], pixels[worst == 2], pixels[worst == 3] = 0, 1, 2
    height, width = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    colors = [(128, 128, 128), _rgb(INF_COLOR), _rgb(NAN_COLOR)]
    colors += [shade(i / (_SHADES - 1)) for i in range(_SHADES)]
    data = b"\x89PNG\r\n\x1a\n"
    data += _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    data += _chunk(b"PLTE", bytes(part for color in colors for part in color))
    data += _chunk(b"tRNS", b"\0") + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def shade(part: float) -> tuple[int, int, int]:
    """The colour at a part (0 to 1) of the scale."""
    place = min(max(part, 0.0), 1.0) * (len(SCALE) - 1)
    i = min(int(place), len(SCALE) - 2)
    pairs = zip(_rgb(SCALE[i]), _rgb(SCALE[i + 1]), strict=True)
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in pairs)
    return red, green, blue


def _rgb(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)
