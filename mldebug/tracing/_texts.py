"""The text of lines and calls, as bytes; read once for each line."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from types import CodeType
from typing import Any

from mldebug.tracing._lines import CALL, shorten
from mldebug.tracing._select import function_of, kind_of, module_of, path_of

_MOST = 2000  # bytes of a line
_FILES = 2000  # sources kept; a program that makes modules without end gets them read again


def call_text(code: CodeType, names: Mapping[str, Any]) -> bytes:
    """`        package.module:12 function`; user code is named by its path."""
    path = path_of(code, names)
    home = path if kind_of(path, names) == "user" else module_of(path, names)
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen"):
        home = f"{home} {code.co_filename}" if home != code.co_filename else home  # made by that module
    text = f"{home}:{code.co_firstlineno} {function_of(code)}".encode("utf-8", "backslashreplace")
    return CALL + shorten(text, _MOST)


def line_text(code: CodeType, line: int, name: str, path: str, loader: Any, module: str) -> bytes:
    """`train.py:    12:     loss.backward()`, without the time. The source may be missing."""
    return shorten(
        f"{name}:{line:>6}: ".encode("utf-8", "backslashreplace") + source(code, line, path, loader, module), _MOST
    )


def source(code: CodeType, line: int, path: str, loader: Any, module: str) -> bytes:
    """A line as it stands in the file, in whatever encoding, without its end. `(no source)` where there is none."""
    lines = _sources.get(path)
    if lines is None or path.startswith("<"):
        lines = _read(code, path, loader, module)
        if len(_sources) >= _FILES:
            _sources.clear()
        _sources[path] = lines
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen"):
        lines = _generated(code.co_filename)  # code that a module of a file has made
    return lines[line - 1].rstrip() if 0 < line <= len(lines) else b"(no source)"


_sources: dict[str, list[bytes]] = {}


def _read(code: CodeType, path: str, loader: Any, module: str) -> list[bytes]:
    if path.startswith("<frozen "):
        path = os.path.join(os.path.dirname(os.__file__), *path[len("<frozen ") : -1].split(".")) + ".py"
    if path.startswith("<"):
        return _generated(path)
    try:
        with open(path, "rb") as file:
            return file.read().split(b"\n")
    except OSError:
        pass
    try:  # in a zip file, say
        text = loader.get_source(module)
    except Exception:
        text = None
    return _encoded(text.split("\n")) if isinstance(text, str) else _generated(code.co_filename)


def _generated(name: str) -> list[bytes]:
    """Code of no file whose maker has left the text with linecache, as notebooks do."""
    entry = linecache.cache.get(name)
    return _encoded(entry[2]) if entry is not None and len(entry) > 2 else []


def _encoded(lines: list[str]) -> list[bytes]:
    return [line.encode("utf-8", "backslashreplace") for line in lines]


def source_names(names: Mapping[str, Any]) -> tuple[Any, str]:
    """What reads the source of a module that is in no file: its loader and its name."""
    loader, name = names.get("__loader__"), names.get("__name__", "")
    spec = names.get("__spec__")
    if name == "__main__" and spec is not None:
        name = getattr(spec, "name", name)
    return loader, str(name)
