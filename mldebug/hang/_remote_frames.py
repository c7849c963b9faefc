"""How an answer travels: as short lines of text, so that it survives whatever carries them.

A line is at most 1000 bytes long, since srun cuts longer ones in pieces and mixes them with those of other nodes:

    mldebug1 node17 3 12 eJzNWVtz...      part 3 of 12 of what node17 answers: zlib, base64

What does not begin like this (a message of the day, what a shell's startup file prints) is no part of an answer. All of
it is data from elsewhere: bounded in size, never executed, never unpickled.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from mldebug.core.hosts import is_host
from mldebug.core.launch import Refused

_SIGN = b"mldebug1"
_PART = 640  # characters of base64 on a line
_LINE = 4096  # bytes of a line that are looked at
PACKED = 8 * 1024 * 1024  # bytes of one answer, compressed
UNPACKED = 64 * 1024 * 1024  # and as JSON
_NOISE = 2000


class Damaged(ValueError):
    """An answer that cannot be read; the message says why."""


def pack(name: str, document: dict[str, Any]) -> Iterator[bytes]:
    """The lines of one answer."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode()
    yield from frame(name, base64.b64encode(zlib.compress(text, 6)))


def frame(name: str, packed: bytes) -> Iterator[bytes]:
    """The lines of an answer that was packed already."""
    parts = [packed[start : start + _PART] for start in range(0, len(packed), _PART)]
    for number, part in enumerate(parts, 1):
        yield b"%s %s %d %d %s\n" % (_SIGN, name.encode(), number, len(parts), part)


def unpack(packed: bytes) -> Any:
    """The document of an answer whose parts were joined."""
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(base64.b64decode(packed, validate=True), UNPACKED)
        if inflater.unconsumed_tail or not inflater.eof:
            raise Damaged("it is cut off, or larger than 64 MiB")
        return json.loads(text)
    except (binascii.Error, zlib.error, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise exc if isinstance(exc, Damaged) else Damaged(f"it is damaged: {exc}") from exc


class FrameReader:
    """Takes what a call writes and gives `answer(name, packed)` for each answer that is whole.

    `allowed` says whose answers this call may bring: a node cannot answer for another one.
    """

    def __init__(self, allowed: Callable[[str], bool], answer: Callable[[str, bytes], None], nodes: int = 1) -> None:
        self.allowed = allowed
        self.answer = answer
        self.left = (PACKED + PACKED // 8) * nodes
        self.noise = bytearray()
        self._parts: dict[str, list[bytes]] = {}
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            raise Refused("it sent more than an answer can have (8 MiB), so it was cut off")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LINE:
            self._keep(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        match = _FRAME.fullmatch(line.rstrip(b"\r"))
        if match is None:
            return self._keep(line)
        name, number, total = match[1].decode(), int(match[2]), int(match[3])
        if not is_host(name) or not self.allowed(name):
            return self._keep(line[:80])
        parts = self._parts.setdefault(name, [])
        if number != len(parts) + 1 or number > total:  # a part is missing, or it starts again
            parts.clear()
            if number != 1:
                return None
        parts.append(match[4])
        if number == total:
            del self._parts[name]
            self.answer(name, b"".join(parts))
        return None

    def _keep(self, line: bytes) -> None:
        if len(self.noise) < _NOISE and line.strip():
            self.noise += line[:400] + b"\n"


_FRAME = re.compile(rb"mldebug1 (\S{1,300}) (\d{1,6}) (\d{1,6}) ([A-Za-z0-9+/=]{1,900})")
