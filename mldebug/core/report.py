"""Report: what every check and scope returns, and how a command prints it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json as jsonlib
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TextIO

from mldebug.core.errors import MldebugError


@dataclasses.dataclass(frozen=True)
class Report:
    """The base of all reports: a frozen dataclass whose fields are what was found.

    A subclass says when it is `ok` and usually writes its own `text`.

        report = diagnose(model, step, steps=100)
        print(report.text()); report.ok or sys.exit(1)
    """

    schema: ClassVar[int] = 1  # raised when a key of to_dict() changes its meaning or goes away

    @property
    def ok(self) -> bool:
        """Whether no trouble was found."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, with the version of their layout under "schema"."""
        fields = {field.name: jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"schema": self.schema, "ok": self.ok, **fields}

    def text(self, color: bool = False, width: int = 80) -> str:
        """The report for people, in lines of at most `width` columns; `color` adds terminal colours."""
        rows = {key: value for key, value in self.to_dict().items() if key != "schema"}
        indent = " " * (max(map(len, rows)) + 2)
        lines = [
            textwrap.fill(f"{key:<{len(indent)}}{_plain(value)}", width, subsequent_indent=indent)
            for key, value in rows.items()
        ]
        text = "\n".join(lines)
        return paint(text) if color else text

    def json(self) -> str:
        """The report as one line of strict JSON: nan and the infinities are strings."""
        return jsonlib.dumps(jsonable(self.to_dict()), allow_nan=False)


def jsonable(value: Any) -> Any:
    """`value` in the types of strict JSON; what has no place there becomes its `str`.

    nan and the infinities become "nan", "inf" and "-inf"; dataclasses and mappings objects; sequences and sets lists.

        jsonable({"loss": float("nan")})  # {"loss": "nan"}
    """
    if isinstance(value, enum.Enum):
        return jsonable(value.value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [jsonable(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if callable(getattr(value, "tolist", None)):  # arrays and tensors, of any number of dimensions
        return jsonable(value.tolist())
    return str(value)


def emit(
    report: Report,
    *,
    json: bool = False,
    output: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    no_color: bool = False,
    stream: TextIO | None = None,
    beside: bool = False,
) -> None:
    """Print a command's report to `stream` (stdout): its JSON, or its text, coloured where that is a terminal.

    `output` also writes the JSON document to a file; `quiet` leaves the text of a report without trouble out.
    `beside` a program that runs underneath stdout is the program's, and the text goes to stderr, as `tell` does it.
    Any other stream, or a file, that cannot be written is an MldebugError.

        emit(report, json=args.json, output=args.output)
    """
    stream = sys.stdout if stream is None else stream
    if output is not None:
        _write_file(Path(output), report.json() + "\n")
    if json:
        write(report.json() + "\n", stream)
    elif not (quiet and report.ok):
        where = sys.stderr if beside else stream
        width = min(shutil.get_terminal_size().columns, 120) if _is_terminal(where) else 80
        text = report.text(color=wants_color(where, no_color), width=width).rstrip("\n") + "\n"
        if beside:
            tell(text)
        else:
            write(text, where)


def wants_color(stream: TextIO | None, no_color: bool = False) -> bool:
    """Whether `stream` is a terminal that shows colours and nobody asked for none (see no-color.org)."""
    dumb = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return _is_terminal(stream) and not no_color and not dumb


def write(text: str, stream: TextIO | None) -> None:
    """Write and flush. Signs that the stream's encoding lacks are escaped, not an error.

    A stream that is closed (Python's own is None then) or takes no more is an MldebugError; only a reader that went
    away stays a BrokenPipeError.
    """
    if stream is None or getattr(stream, "closed", False):
        raise cannot_write("it is closed")
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        if text:  # where nothing is buffered, a full device refuses even nothing
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise cannot_write((exc.strerror or str(exc)).lower()) from exc


def tell(text: str) -> None:
    """Write to stderr, beside a program that runs underneath. Where stderr takes nothing, there is nowhere to say so,
    and it is no reason to end the program or to change its status.
    """
    with contextlib.suppress(MldebugError, OSError, ValueError):
        write(text, sys.stderr)


def cannot_write(reason: str) -> MldebugError:
    """The error for a stdout or stderr that takes nothing."""
    return MldebugError(f"cannot write the output: {reason}", "send it where it can be written, for example > FILE")


def paint(text: str) -> str:
    """`text` with terminal colours on what the eye looks for: nan, inf and hints. Only this loads rich."""
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    painted = Text(text)
    for pattern, style in _STYLES:
        painted.highlight_regex(pattern, style)
    buffer = StringIO()
    console = Console(file=buffer, force_terminal=True, color_system="standard", no_color=False)
    console.print(painted, end="", soft_wrap=True)
    return buffer.getvalue()


_STYLES = (
    (r"(?i)(?<![\w.])[+-]?(nan|inf)(?![\w.])", "bold red"),
    (r"(?m)^hint: .*$", "green"),
    (r"(?m)^ok +(?P<x>True)$", "green"),
    (r"(?m)^ok +(?P<x>False)$", "red"),
)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not getattr(stream, "closed", False) and stream.isatty()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else jsonlib.dumps(value)


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise MldebugError(f"cannot write {path}: {(exc.strerror or str(exc)).lower()}", "choose another -o") from exc
