"""The pair matrix as characters: GPUs by GPUs where they fit, else nodes by nodes and the worst of them larger."""

from __future__ import annotations

from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import FAILED
from mldebug.cluster.pairs._grid import Grid

_SHORT = {"hang": "hng", "error": "err", "wrong": "wrg", "dead": "ded"}
_LABEL, _CELL = 13, 4
BAD = 0.8  # of what siblings reach: slower cells are marked
_SURE = -5.0


def heat_lines(cells: Grid, off: Any, z: Any, width: int = 80) -> list[str]:
    """The lines of the map, at most `width` wide. `off` and `z` are what distances() gives."""
    room = max(2, min(32, (width - _LABEL) // _CELL))
    bad = (cells.failed > 0) | ((z < _SURE) & (off < np.log(BAD)))
    # What a file has in both directions alike was judged once, and stands in both.
    off, bad = (np.where(cells.twin, values.T, values) for values in (off, bad))
    if cells.size <= room:
        return _gpu_lines(cells, off, bad, np.arange(cells.size), np.arange(cells.size))
    if len(cells.hosts) == 1 or cells.size == len(cells.hosts):
        shown = _worst(np.where(bad, 1, 0).sum(axis=0) + np.where(bad, 1, 0).sum(axis=1), room)
        head = f"{room} of {cells.size} GPUs, those with most bad pairs among them"
        return [head, *_gpu_lines(cells, off, bad, shown, shown)]
    lines, worst = _node_lines(cells, off, bad, room)
    if worst is not None:
        rows, columns = (cells.members(node)[:room] for node in worst)
        names = " to ".join(cells.hosts[node] for node in dict.fromkeys(worst))
        lines += ["", f"{_tail(names, width - 12)}, larger", *_gpu_lines(cells, off, bad, rows, columns)]
    return lines


def _short_hosts(cells: Grid) -> list[str]:
    """Host names without their domains, where they differ without."""
    short = [host if host.replace(".", "").isdecimal() else host.partition(".")[0] for host in cells.hosts]
    return short if len(set(short)) == len(short) else cells.hosts


def _gpu_lines(cells: Grid, off: Any, bad: Any, rows: Any, columns: Any) -> list[str]:
    """GBps of each pair, or per cent of what its siblings reach where GBps would not fit."""
    rate = np.where(cells.twin, cells.rate.T, cells.rate)
    block = rate[np.ix_(rows, columns)]
    known = block[np.isfinite(block)]
    hosts = _short_hosts(cells)
    names = {
        row: _tail(hosts[cells.node[row]] + cells.names[row][len(cells.hosts[cells.node[row]]) :], 8) for row in rows
    }
    fits = not len(known) or np.exp(known.max()) < 999.5
    lines = [
        f"{'GBps' if fits else '% of what siblings reach'}, from the row to the column; ! is bad",
        " " * _LABEL + "".join(f"{column:>3} " for column in columns),
    ]
    for row in rows:
        parts = []
        for column in columns:
            if row == column:
                parts.append("  . ")
            elif cells.failed[row, column]:
                parts.append(f"{_SHORT[FAILED[cells.failed[row, column] - 1]]}!")
            elif not np.isfinite(rate[row, column]) and cells.well[row, column]:
                parts.append(" ok ")
            elif not np.isfinite(rate[row, column]):
                parts.append("  - ")
            else:
                value = np.exp(rate[row, column]) if fits else 100 * np.exp(off[row, column])
                parts.append(f"{number(value):>3}{'!' if bad[row, column] else ' '}")
        lines.append(f"{row:>3} {names[row]:<{_LABEL - 5}} {''.join(parts)}")
    return [line.rstrip() for line in lines]


def _node_lines(cells: Grid, off: Any, bad: Any, room: int) -> tuple[list[str], tuple[int, int] | None]:
    """Per cent of what siblings reach, for each two nodes; and the worst two, if any are bad."""
    measured = by_nodes(cells, cells.measured | cells.twin)
    wrong, failed = by_nodes(cells, bad), by_nodes(cells, cells.failed > 0)
    total = by_nodes(cells, np.where(np.isfinite(off) & (cells.failed == 0), off, 0))
    count = by_nodes(cells, np.isfinite(off) & (cells.failed == 0))
    nodes, hosts = len(cells.hosts), _short_hosts(cells)
    shown = np.arange(nodes) if nodes <= room else _worst(wrong.sum(axis=0) + wrong.sum(axis=1), room)
    some = "" if nodes <= room else f" {room} of {nodes} nodes, those with most bad pairs among them."
    lines = [
        f"% of what siblings reach, from the row's node to the column's; ! has bad pairs.{some}",
        " " * _LABEL + "".join(f"{column:>3} " for column in shown),
    ]
    for row in shown:
        parts = []
        for column in shown:
            mark = "!" if wrong[row, column] else " "
            if not measured[row, column]:
                parts.append("  . " if row == column else "  - ")
            elif 2 * failed[row, column] > measured[row, column]:
                codes = cells.failed[np.ix_(cells.members(int(row)), cells.members(int(column)))]
                code = int(np.bincount(codes[codes > 0]).argmax())
                parts.append(f"{_SHORT[FAILED[code - 1]]}!")
            else:
                level = 100 * np.exp(total[row, column] / max(count[row, column], 1))
                parts.append(f"{min(level, 999):>3.0f}{mark}" if count[row, column] else f"  -{mark}")
        lines.append(f"{row:>3} {_tail(hosts[row], _LABEL - 5):<{_LABEL - 5}} {''.join(parts)}")
    share = wrong / np.maximum(measured, 1)
    worst = np.unravel_index(int(np.argmax(share * 1e6 + wrong)), share.shape) if wrong.any() else None
    return [line.rstrip() for line in lines], None if worst is None else (int(worst[0]), int(worst[1]))


def by_nodes(cells: Grid, values: Any) -> Any:
    """Sums over the pairs of each two nodes."""
    starts = np.flatnonzero(np.r_[True, cells.node[1:] != cells.node[:-1]])
    return np.add.reduceat(np.add.reduceat(values.astype(np.float64), starts, axis=0), starts, axis=1)


def number(value: float) -> str:
    """A bandwidth in three characters or few more: 392, 45, 4.5, .05."""
    if value >= 9.95:
        return f"{value:.0f}"
    if value >= 0.095:
        return f"{value:.1f}"
    return f"{value:.2f}"[1:] if value >= 0.005 else "0"


def _worst(badness: Any, room: int) -> Any:
    """The places of the worst, and of others to compare them with, in their order."""
    order = np.argsort(-badness, kind="stable")
    return np.sort(order[:room])


def _tail(name: str, most: int) -> str:
    return name if len(name) <= most else f"…{name[-(most - 1) :]}"
