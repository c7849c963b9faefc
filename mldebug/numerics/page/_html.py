"""A report as one page for a browser: the answer, the operation, a map of all tensors, the frames. Loads nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mldebug.core.errors import MldebugError
from mldebug.numerics.page._html_grid import grid_of
from mldebug.numerics.page._html_map import map_section

if TYPE_CHECKING:
    from mldebug.numerics._event import Event, Operation
    from mldebug.numerics._report import NumericsReport
    from mldebug.numerics.ops._operands import Operand

_FRAMES, _STEPS, _NOTES, _OPERANDS = 4000, 200, 100, 60  # the most that are shown: lines of frames, steps, notes, rows
_LONG = 2000  # signs of one text
_WIDTH = 110  # columns of the frames
_BAD = re.compile(r"^\s*(?:\S+\s+)?[-+]?(?:nan|inf)\s")  # a line of a frame: abs min, abs max, what it is of


def page(report: NumericsReport) -> str:
    """The report as one HTML document, in ASCII. All text of the run is escaped; nothing is loaded from elsewhere.

    The text, the operands, the frames and two small pictures need no script; only the large map does.

        Path("report.html").write_text(page(report))
    """
    document = "\n".join(_lines(report)) + "\n"
    return document.encode("ascii", "xmlcharrefreplace").decode()


def write_page(document: str, path: str | os.PathLike[str]) -> None:
    """Write a page; MldebugError where that cannot be done. A page that is there stays until the new one is whole."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(document, encoding="ascii")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        reason = (error.strerror or str(error)).lower()
        raise MldebugError(f"cannot write {target}: {reason}", "give a path in a folder that exists") from error


def _lines(report: NumericsReport) -> Iterator[str]:
    script = _beside("_html.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    title = _text(report.verdict)
    grid = grid_of(report)
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield f"<title>{title}</title><style>{_beside('_html.css')}</style></head>"
    yield f'<body class="{"fine" if report.ok else "bad"}"><h1>{title}</h1>'
    if report.reading:
        yield f"<p>{_text(report.reading)}</p>"
    if report.hint:
        yield f'<p class="hint"><b>What to do:</b> {_text(report.hint)}</p>'
    if report.event is not None:
        yield from _facts(report.event)
        if report.event.operation is not None:
            yield from _operation(report.event.operation)
    if grid is not None:
        yield from map_section(grid)
    yield from _frames(report)
    yield from _steps(report.history)
    yield from _notes(report.notes)
    yield f'<p class="dim">{report.batches} forward passes, {report.steps} steps, seen by mldebug overflow.</p>'
    if grid is not None:
        yield f"<script>{script}</script>"
    yield "</body></html>"


def _facts(event: Event) -> Iterator[str]:
    """The event, a line for each thing that is known of it."""
    step = f"{event.step} (batch {event.batch}, micro-batch {event.micro_batch})"
    phase = event.phase if event.training or event.phase != "forward" else f"{event.phase}, in eval mode"
    tensor = f"{event.param or event.name}, {event.dtype}"
    if math.isfinite(event.limit):
        tensor += f" (largest value {event.limit:.5g})"
    facts = {
        "step": step,
        "phase": phase,
        "module": event.where,
        "operation": event.op or "",
        "line": _line(event.operation),
        "cause": event.operation.cause if event.operation is not None else "",
        "tensor": tensor,
        "bad": f"{event.bad} of {event.numel} elements" if event.bad and event.numel else "",
        "sample": "" if event.sample is None else f"{event.sample} is the first bad one of the batch",
        "rank": str(event.rank),
        "replay": event.again,
        "harmless": "yes: only the loss scale makes it, and the step is skipped" if event.benign else "",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value)
    yield f"<dl>{rows}</dl>"


def _line(made: Operation | None) -> str:
    if made is None or not made.file:
        return ""
    return f"{made.file}:{made.line}, in {made.function.rpartition('<locals>.')[2]}"


def _operation(made: Operation) -> Iterator[str]:
    """The source line, and the operands as a table."""
    if made.code:
        yield f"<pre>{_text(made.code)}</pre>"
    if not made.operands and not made.results:
        return
    of = f"{made.op}, which computed the gradient of {made.forward_op or 'an operation'}" if made.node else made.op
    yield f"<h2>What {_text(of)} was given, and made</h2>"
    yield '<div class="wide"><table><tr><th></th><th>tensor</th><th>shape</th><th>dtype</th><th>finite values</th>'
    yield '<th class="n">nan or inf</th></tr>'
    rows = [("given", one) for one in made.operands] + [("made", one) for one in made.results]
    for side, one in rows[:_OPERANDS]:
        yield f"<tr><td>{side}</td>{_operand(one)}</tr>"
    yield "</table></div>"
    if len(rows) > _OPERANDS:
        yield f"<p>... and {len(rows) - _OPERANDS} more.</p>"


def _operand(one: Operand) -> str:
    name = f"<td>{_text(one.name)}</td>"
    if one.shape is None:
        return f'{name}<td colspan="4">{_text(one.value)}</td>'
    shape = "\u00d7".join(map(str, one.shape)) or "scalar"
    size = math.prod(one.shape)
    if one.low is None or one.high is None:
        seen = "none" if size else "empty"
    else:
        seen = f"{one.low:.4g}" if one.low == one.high else f"{one.low:.4g} .. {one.high:.4g}"
    bad = f'<td class="n bad">{one.bad} of {size}</td>' if one.bad else '<td class="n">0</td>'
    return f'{name}<td>{shape}</td><td class="s">{_text(one.dtype)}</td><td>{seen}</td>{bad}'


def _frames(report: NumericsReport) -> Iterator[str]:
    """The frames, the last lines if they are very many; lines with a NaN or inf stand out."""
    if not report.frames:
        return
    lines = report.frames_text(_WIDTH).rstrip().splitlines()
    left_out = len(lines) - _FRAMES
    yield "<h2>Frames</h2>"
    if left_out > 0:
        yield f"<p>{left_out} lines before these are left out.</p>"
    shown = (_text(line[:_WIDTH]) for line in lines[-_FRAMES:])
    marked = (f'<b class="bad">{line}</b>' if _BAD.match(line) else line for line in shown)
    yield "<pre>" + "\n".join(marked) + "</pre>"


def _steps(history: list[dict[str, Any]]) -> Iterator[str]:
    if not history:
        return
    yield '<h2>Last steps</h2><div class="wide"><table><tr><th class="n">step</th><th class="n">loss</th>'
    yield '<th class="n">grad norm</th><th class="n">abs max</th><th>in</th></tr>'
    for row in history[-_STEPS:]:
        cells = "".join(_number(row.get(key)) for key in ("loss", "grad_norm", "absmax"))
        event = f' <b class="bad">{_text(row["event"])}</b>' if row.get("event") else ""
        yield f'<tr><td class="n">{row["step"]}</td>{cells}<td>{_text(row.get("where", ""))}{event}</td></tr>'
    yield "</table></div>"


def _number(value: float | None) -> str:
    if value is None:
        return '<td class="n">-</td>'
    return f'<td class="n{"" if math.isfinite(value) else " bad"}">{value:.3e}</td>'


def _notes(notes: list[str]) -> Iterator[str]:
    if notes:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{_text(note)}</li>' for note in notes[:_NOTES])}</ul>"


def _text(text: str) -> str:
    """Text of the run for the page: escaped, bounded, and without what would not print."""
    text = text if len(text) <= _LONG else f"{text[:_LONG]} ..."
    return escape("".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text), quote=True)


def _beside(name: str) -> str:
    """A part of the page that lies beside this module."""
    return Path(__file__).with_name(name).read_text(encoding="ascii")
