"""captured(): what code wrote to stdout, stderr and a logger, that of C++ and of child processes included."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
from types import TracebackType
from typing import IO, TextIO


class captured:
    """Keeps what is written to stdout and stderr while it is open, whoever writes it, and passes it on at the end.

    Afterwards `.out`, `.err` and `.log` are text; a line that was overwritten with `\\r`, as progress bars do, is there
    as it stood at last. `log` names a logger whose records are kept from `level` on ("" is the root); it is heard even
    if it does not propagate, as that of transformers. `replay=False` passes nothing on.

        with captured(log="transformers") as seen:
            train()
        assert "epoch 3" in seen.out and "deprecated" not in seen.log
    """

    def __init__(self, *, log: str | None = None, level: int = logging.DEBUG, replay: bool = True) -> None:
        self.out = self.err = self.log = ""
        self._logger = None if log is None else logging.getLogger(log)
        self._level, self._replay = level, replay

    def __enter__(self) -> captured:
        self._streams = [_Stream("stdout", 1), _Stream("stderr", 2)]
        if self._logger is not None:
            self._records = io.StringIO()
            self._handler = logging.StreamHandler(self._records)
            self._handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            self._old_level = self._logger.level
            self._logger.setLevel(self._level)
            self._logger.addHandler(self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._logger is not None:
            self._logger.removeHandler(self._handler)
            self._logger.setLevel(self._old_level)
            self.log = self._records.getvalue()
        texts = [stream.end() for stream in reversed(self._streams)][::-1]
        self.out, self.err = map(_as_it_stood, texts)
        if self._replay:
            for stream, text in zip((sys.stdout, sys.stderr), texts, strict=True):
                stream.write(text)


class _Stream:
    """Python's stream and the descriptor below it, which C++ and child processes write to, both sent to a file."""

    def __init__(self, name: str, fd: int) -> None:
        self._name, self._fd = name, fd
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._python: TextIO = getattr(sys, name)
        self._python.flush()
        self._descriptor = os.dup(fd)
        os.dup2(self._file.fileno(), fd)
        setattr(sys, name, io.TextIOWrapper(os.fdopen(os.dup(fd), "wb"), encoding="utf-8", write_through=True))

    def end(self) -> str:
        with contextlib.suppress(ValueError):  # closed by the code that was watched
            getattr(sys, self._name).close()
        setattr(sys, self._name, self._python)
        os.dup2(self._descriptor, self._fd)
        os.close(self._descriptor)
        with self._file as file:
            file.seek(0)
            return file.read().decode("utf-8", "replace")


def _as_it_stood(text: str) -> str:
    return re.sub(r"^[^\n]*\r(?!\n)", "", text, flags=re.M).replace("\r\n", "\n")
