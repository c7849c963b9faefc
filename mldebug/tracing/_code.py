"""What is known of one traced code object."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from mldebug.tracing._select import function_of, path_of
from mldebug.tracing._texts import call_text, line_text, source_names


class Lines(dict[int, Any]):
    """From the number of a line to what is written for it; `encode` makes that of a text, once for each line.

    The code object is held weakly: exec'd code must die as it would untraced. `gone` is called before its id can be
    used again. No globals are kept.
    """

    __slots__ = (
        "_encode",
        "_loader",
        "_module",
        "arguments",
        "call",
        "code",
        "function",
        "hits",
        "key",
        "name",
        "path",
        "start",
    )

    def __init__(
        self,
        code: CodeType,
        names: Mapping[str, Any],
        encode: Callable[[Lines, int, bytes], Any],
        gone: Callable[[int], None],
    ) -> None:
        self._encode = encode
        self._loader, self._module = source_names(names)
        # The reference keeps this object until the code goes, and no cycle comes of it.
        self.key = key = id(code)
        self.code = weakref.ref(code, lambda _: gone(key))
        self.path = path_of(code, names)
        frozen = code.co_filename.startswith("<frozen")
        self.name = os.path.basename(self.path if frozen else code.co_filename)
        self.function = function_of(code)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        self.arguments = code.co_varnames[:count]
        self.call = call_text(code, names)
        self.hits: dict[int, int] = {}
        # Where a generator begins, for sys.settrace, which shows its going on as a call too.
        self.start: int | None = None

    def __missing__(self, line: int) -> Any:
        code = self.code()
        text = b"" if code is None else line_text(code, line, self.name, self.path, self._loader, self._module)
        return self._encode(self, line, text)

    def at(self, line: int, words: str) -> bytes:
        """`train.py:    12: words`."""
        return f"{self.name}:{line:>6}: {words}".encode("utf-8", "backslashreplace")
