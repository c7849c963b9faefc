"""JSON lines over plain sockets that never block: what the parts of a dist-test say to each other.

Nothing here needs torch: what is under test must not carry its own result.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import socket
import time
import zlib
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_LONGEST = 32 * 1024 * 1024  # bytes of one line, and of what a slow reader may leave unread
_TRIES = 8  # ports that a collector may choose from


class Gone(Exception):
    """The other end is not there any more; the text says how that was noticed."""


class Wire:
    """One end of a connection. `send` and `receive` return at once; `heard` is when something came last."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard = time.monotonic()
        self._in = bytearray()
        self._out = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def waits_to_write(self) -> bool:
        return bool(self._out)

    def send(self, message: Message) -> None:
        """Raises Gone where the other end has gone, or has not read for too long."""
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if len(self._out) > _LONGEST:
            raise Gone("it does not read what is sent to it")
        self.flush()

    def flush(self) -> None:
        while self._out:
            try:
                sent = self.sock.send(self._out)
            except BlockingIOError:
                return
            except OSError as exc:
                raise Gone(reason(exc)) from exc
            del self._out[:sent]

    def receive(self) -> list[Message]:
        """The messages that have come. Raises Gone at the end of the connection, once all of them were returned."""
        why = ""
        while len(self._in) <= _LONGEST:
            try:
                data = self.sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError as exc:
                why = reason(exc)
                break
            if not data:
                why = "it closed the connection"
                break
            self._in += data
            self.heard = time.monotonic()
        whole, newline, rest = bytes(self._in).rpartition(b"\n")
        if newline:
            self._in = bytearray(rest)
            return _messages(whole)
        if why or len(self._in) > _LONGEST:
            raise Gone(why or "it sends lines without end")
        return []

    def wait(self, deadline: float) -> list[Message]:
        """The next messages, or none by the deadline (of time.monotonic()). For one that has nothing else to do."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.sock, selectors.EVENT_READ)
            while True:
                self.flush()
                if found := self.receive():
                    return found
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                selector.select(min(left, 0.05 if self._out else 1.0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


def reason(exc: OSError) -> str:
    """`refused`, `filtered (timeout)`, ...: how a connection failed, in the words of a person who looks for it."""
    if isinstance(exc, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(exc, TimeoutError) or exc.errno in (errno.ETIMEDOUT, errno.EAGAIN, errno.EINPROGRESS):
        return "filtered (timeout)"
    known = {
        errno.ECONNREFUSED: "refused",
        errno.EHOSTUNREACH: "no route to host",
        errno.ENETUNREACH: "network unreachable",
        errno.ECONNRESET: "it reset the connection",
        errno.EPIPE: "it closed the connection",
        errno.EADDRNOTAVAIL: "no such address here",
    }
    return known.get(exc.errno or 0) or (exc.strerror or str(exc)).lower()


def resolve(name: str) -> list[str]:
    """The addresses of a name as this host sees it, IPv4 first; none where it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = dict.fromkeys(str(one[4][0]) for one in found)
    return sorted(addresses, key=lambda address: ":" in address)


def ports(job: str) -> list[int]:
    """Where the collector of a job may listen: all ranks come to the same list without asking anybody.

    They are below the ports that kernels give out, so that hardly anybody else has them; the first that is free is
    taken, and who connects asks for the job's name.
    """
    start = zlib.crc32(job.encode())
    return [21000 + (start + 997 * number) % 8000 for number in range(_TRIES)]


def listen(candidates: Sequence[int] = (0,), address: str = "") -> socket.socket:
    """A listening socket, of all interfaces by default, on the first of these ports that is free."""
    trouble: OSError | None = None
    for port in candidates:
        for family in (socket.AF_INET6, socket.AF_INET) if not address else (_family(address),):
            try:
                return _listening(family, address, port)
            except OSError as exc:
                trouble = exc
                if exc.errno == errno.EADDRINUSE:
                    break
    raise trouble or OSError(errno.EADDRINUSE, "no port is free")


def connects(addresses: Sequence[tuple[str, int]], seconds: float) -> dict[tuple[str, int], socket.socket | str]:
    """Connect to all of these at once: a socket for each, or why there is none within `seconds`."""
    found: dict[tuple[str, int], socket.socket | str] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for place in dict.fromkeys(addresses):
            try:
                sock = socket.socket(_family(place[0]), socket.SOCK_STREAM)
                sock.setblocking(False)
                code = sock.connect_ex(place)
            except OSError as exc:
                found[place] = reason(exc)
                continue
            if code not in (0, errno.EINPROGRESS):
                sock.close()
                found[place] = reason(OSError(code, os.strerror(code)))
                continue
            selector.register(sock, selectors.EVENT_WRITE, place)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(left):
                sock = key.fileobj  # type: ignore[assignment]
                selector.unregister(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    found[key.data] = sock
                else:
                    sock.close()
                    found[key.data] = reason(OSError(code, os.strerror(code)))
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
            found[key.data] = "filtered (timeout)"
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listening(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _messages(lines: bytes) -> list[Message]:
    """What is no JSON object is left out: anything may connect to a port."""
    found = []
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):  # brackets in brackets, without end
            message = json.loads(line)
            if isinstance(message, dict):
                found.append(message)
    return found


def allow_files(count: int) -> None:
    """A connection is an open file, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        with contextlib.suppress(OSError, ValueError):
            most = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
