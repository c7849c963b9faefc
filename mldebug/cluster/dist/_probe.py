"""Whether more than a few bytes come through to another host: an MTU that is too large for the way lets a connection
be made, and then nothing passes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Sequence

LARGE = 256 << 10  # bytes that a rank sends to some of the others
SLOW = 1.0  # seconds that they take on no way that is fit for training
_DONE = b"k"


def answer(listener: socket.socket) -> None:
    """Read what comes in on a listening socket until it is closed, and say so to who has sent LARGE bytes."""
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()


def _answer(listener: socket.socket) -> None:
    with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError, KeyError):
        selector.register(listener, selectors.EVENT_READ)
        got: dict[socket.socket, int] = {}
        while listener.fileno() >= 0:
            for key, _ in selector.select(0.5):
                if key.fileobj is listener:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        sock, _ = listener.accept()
                        sock.setblocking(False)
                        got[sock] = 0
                        selector.register(sock, selectors.EVENT_READ)
                    continue
                sock = key.fileobj  # type: ignore[assignment]
                try:
                    data = sock.recv(LARGE)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                got[sock] += len(data)
                if got[sock] >= LARGE:
                    with contextlib.suppress(OSError):
                        sock.send(_DONE)
                if not data or got[sock] >= LARGE:
                    selector.unregister(sock)
                    sock.close()
                    del got[sock]


def send_large(socks: Sequence[socket.socket], seconds: float) -> list[float | None]:
    """Send LARGE bytes on each of these connections at once: the seconds until all had come, or None."""
    began, took, left = time.monotonic(), dict.fromkeys(socks, -1.0), dict.fromkeys(socks, LARGE)
    data = bytes(LARGE)
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            sock.setblocking(False)
            selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < began + seconds:
            for key, events in selector.select(0.1):
                sock = key.fileobj  # type: ignore[assignment]
                try:
                    if events & selectors.EVENT_READ:
                        took[sock] = time.monotonic() - began if sock.recv(1) == _DONE else -1.0
                        selector.unregister(sock)
                    elif left[sock]:
                        left[sock] -= sock.send(data[: left[sock]])
                        if not left[sock]:
                            selector.modify(sock, selectors.EVENT_READ)
                except BlockingIOError:
                    continue
                except OSError:
                    selector.unregister(sock)
    return [took[sock] if took[sock] >= 0 else None for sock in socks]


def some_of_other_hosts(mine: int, peers: Sequence[Sequence[object]]) -> set[object]:
    """Ranks to try with much: of the hosts that are 1, 2, 4, ... further on, one each; so all of a few hosts."""
    hosts: dict[object, list[object]] = {}
    for rank, host, *_ in peers:
        hosts.setdefault(host, []).append(rank)
    names = list(hosts)
    here = next((number for number, name in enumerate(names) if mine in hosts[name]), None)
    if here is None or len(names) < 2:
        return set()
    place = hosts[names[here]].index(mine)
    steps = range(1, len(names)) if len(names) <= 8 else [1 << bit for bit in range(len(names).bit_length() - 1)]
    chosen = set()
    for step in steps:
        there = hosts[names[(here + step) % len(names)]]
        chosen.add(there[place % len(there)])
    return chosen
