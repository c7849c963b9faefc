"""The output of several nodes in one stream: whole lines, each with the name of its node."""

from __future__ import annotations

import os
import sys

_LONGEST = 1 << 20  # bytes of a line that is waited for


class Output:
    """A stream that all nodes write to."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._broken = False

    def writer(self, prefix: str) -> Writer:
        return Writer(self, prefix.encode())

    def write(self, data: bytes) -> bool:
        """False where the reader went away; a full disk is told once, and the job goes on."""
        view = memoryview(data)
        while view and not self._broken:
            try:
                view = view[os.write(self.fd, view) :]
            except BrokenPipeError:
                return False
            except OSError as exc:
                self._broken = True
                print(f"mldebug: the output of the nodes is lost from here on: {exc.strerror}", file=sys.stderr)
        return True


class Writer:
    """One stream of one node."""

    def __init__(self, output: Output, prefix: bytes) -> None:
        self._output = output
        self._prefix = prefix
        self._rest = b""

    def take(self, data: bytes) -> bool:
        """Pass whole lines on; b"" is the end of the stream. False where nobody reads them."""
        self._rest += data
        whole, line_break, rest = self._rest.rpartition(b"\n")
        if not data and self._rest:
            whole, line_break, rest = self._rest.removesuffix(b"\n"), b"\n", b""
        elif not line_break and len(rest) > _LONGEST:
            whole, line_break, rest = rest, b"\n", b""
        if not line_break:
            return True
        self._rest = rest
        before = b"\n" + self._prefix
        return self._output.write(self._prefix + whole.replace(b"\n", before) + b"\n")
