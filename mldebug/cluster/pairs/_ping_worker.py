"""What measures TCP between hosts, on each of them: it answers all others, and tries them when it is told to.

Neither torch nor the library that carries the training's messages is loaded: where that does not come up, this does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import select
import selectors
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mldebug.cluster.dist._wire import Gone, Message, Wire, connects, listen, reason, resolve

_PORTS = 8  # listened on, over the range that kernels give out: a firewall may let a part of it through
BATCH = 64  # connections at once
LOOKS = 3  # how often what cannot be reached is tried
LONGEST = 20.0  # seconds, after which it is not tried again
FAR = 3  # ports of a host, far apart
_SILENT = "filtered (timeout)"
_SMALL = 64  # bytes of a ping
_PINGS = 20
_CHUNK = bytes(1 << 18)
_BUFFER = 1 << 20  # bytes under way in the sender: a slow link is to be measured, and not filled
_TELLS = 0.05  # seconds between what the receiver says of what it has got
_LEAST = 4096  # bytes: who got fewer got no full-size segment

Place = tuple[str, str, int]  # name of the host, address, port


class PingWorker:
    """Serves echo and sink on all its ports from a thread, and obeys `wire`."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.listeners = _listeners()

    def run(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()
        ports = [one.getsockname()[1] for one in self.listeners]
        self.wire.send({"t": "ready", "port": ports[0], "ports": ports, **names_here()})
        while True:
            for message in self.wire.wait(time.monotonic() + 60.0):
                answer = reach(message) if message["do"] == "reach" else flow(message)
                self.wire.send({"t": "answer", "id": message["id"], **answer})

    def _serve(self) -> None:
        """A thread for who says something; most only look whether a port can be reached, and many do so at once."""
        with selectors.DefaultSelector() as selector:
            for listener in self.listeners:
                selector.register(listener, selectors.EVENT_READ, True)
            while True:
                for key, _ in selector.select():
                    sock: Any = key.fileobj
                    with contextlib.suppress(OSError):
                        if key.data:
                            peer, _ = sock.accept()
                            selector.register(peer, selectors.EVENT_READ, False)
                            continue
                        selector.unregister(sock)
                        if not _says_something(sock):
                            sock.close()
                            continue
                        threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def reach(message: Message) -> dict[str, Any]:
    """Connect to all `ports` of all `peers` ([name, address, ports]): which of them cannot be reached, and why.

    `full` is how often this host had no room for the address of one more neighbour meanwhile.
    """
    places = [(name, address, int(port)) for name, address, ports in message["peers"] for port in ports]
    before = table_fulls()
    deadline = time.monotonic() + LONGEST
    failed: dict[Place, str] = {}
    left = sorted(places, key=_turns(message["peers"]))
    for turn in range(LOOKS):
        if turn and left:
            time.sleep(random.uniform(0.1, 0.5 * turn))  # all hosts do this at once, and may have had too much of it
        failed = _tried(left, message["seconds"])
        left = [place for place in left if place in failed]
        if time.monotonic() > deadline:
            break
    found: dict[str, dict[str, str]] = {}
    for (name, _, port), why in failed.items():
        found.setdefault(name, {})[str(port)] = why
    return {"failed": found, "full": table_fulls() - before}


def _turns(peers: list[Any]) -> Callable[[Place], tuple[int, int]]:
    """The order of all places: a port of each peer, and ports far apart first, as those of one range share a fate."""
    order: dict[tuple[str, int], tuple[int, int]] = {}
    for at, (name, _, ports) in enumerate(peers):
        many = len(ports)
        spread = sorted(range(many), key=lambda place: (place not in (0, many // 2, many - 1), place))
        order |= {(name, int(ports[place])): (turn, at) for turn, place in enumerate(spread)}
    return lambda place: order[place[0], place[2]]


def _tried(places: list[Place], seconds: float) -> dict[Place, str]:
    """Connect to these, BATCH at a time; why it failed for those that cannot be reached.

    Where FAR ports of a host were silent and none answered, the others are taken for the same: many hosts that are off
    would take too long.
    """
    failed: dict[Place, str] = {}
    silent: dict[str, int] = {}
    answered: set[str] = set()
    waiting = deque(places)
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < BATCH:
                place = waiting.popleft()
                if silent.get(place[0], 0) >= FAR and place[0] not in answered:
                    failed[place] = _SILENT
                    continue
                try:
                    sock = socket.socket(socket.AF_INET6 if ":" in place[1] else socket.AF_INET, socket.SOCK_STREAM)
                    sock.setblocking(False)
                    code = sock.connect_ex(place[1:])
                except OSError as exc:
                    failed[place] = reason(exc)
                    continue
                if code not in (0, errno.EINPROGRESS):
                    failed[place] = reason(OSError(code, os.strerror(code)))
                    sock.close()
                    continue
                selector.register(sock, selectors.EVENT_WRITE, (place, time.monotonic() + seconds))
            events = {key.fd for key, _ in selector.select(0.1)}
            for key in list(selector.get_map().values()):
                place, limit = key.data
                sock = key.fileobj  # type: ignore[assignment]
                if key.fd not in events and time.monotonic() < limit:
                    continue
                selector.unregister(sock)
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if key.fd in events else errno.ETIMEDOUT
                sock.close()
                if code:
                    failed[place] = reason(OSError(code, os.strerror(code)))
                if code == errno.ETIMEDOUT:
                    silent[place[0]] = silent.get(place[0], 0) + 1
                else:
                    answered.add(place[0])
    return failed


def table_fulls(file: str = "/proc/net/stat/arp_cache") -> int:
    """How often the kernel had no room for one more neighbour (net.ipv4.neigh.default.gc_thresh3); 0 where it does not
    say, as in containers with a network of their own."""
    try:
        head, *rows = Path(file).read_text(encoding="ascii").splitlines()
        column = head.split().index("table_fulls")
        return sum(int(row.split()[column], 16) for row in rows)  # a row for each CPU
    except (OSError, ValueError, IndexError):
        return 0


def flow(message: Message) -> dict[str, Any]:
    """Connect, ping and send to one peer: microseconds, GBps, and the share of segments that were sent again.

    `status` is ok, error (no connection) or hang (it came to nothing within `seconds`), and `why` says which part.
    """
    place, seconds = (str(message["address"]), int(message["port"])), float(message["seconds"])
    began = time.perf_counter()
    sock = connects([place], seconds)[place]
    if isinstance(sock, str):
        return {"status": "error", "why": f"no connection: {sock}"}
    found: dict[str, Any] = {"status": "ok", "why": "", "connect_us": round((time.perf_counter() - began) * 1e6, 1)}
    step = "it took the connection, and nothing came back: its processes are stopped or starved"
    try:
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(seconds)
            found["latency_us"] = round(_pingpong(sock, time.monotonic() + seconds), 1)
        step = "small messages pass, and full-size segments never arrive: an MTU along the way is too small"
        with socket.create_connection(place, seconds) as sock:
            got, lasted, again = _send(sock, float(message["lasts"]), seconds)
        if got < _LEAST or lasted <= 0:
            raise TimeoutError
        found |= {"gbps": round(got / lasted / 1e9, 6), "lost": again}
    except TimeoutError:
        found |= {"status": "hang", "why": step}
    except OSError as exc:
        found |= {"status": "error", "why": f"the connection broke: {reason(exc)}"}
    return found


def names_here() -> dict[str, Any]:
    """What this host would tell others of itself: its name, where that leads, and the interfaces that are asked for."""
    name = socket.gethostname()
    wanted = {key: value for key in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if (value := os.environ.get(key))}
    return {"name": name, "leads_to": resolve(name), "wanted": wanted, "cards": [card for _, card in _cards()]}


def _cards() -> list[tuple[int, str]]:
    with contextlib.suppress(OSError):
        return socket.if_nameindex()
    return []


def _listeners() -> list[socket.socket]:
    low, high = 32768, 60999
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    master = os.environ.get("MASTER_PORT", "")
    step = max((high - low) // _PORTS, 1)
    found = []
    for wanted in (*(low + step // 2 + step * number for number in range(_PORTS)), int(master or 29500)):
        with contextlib.suppress(OSError):  # the next ones, where somebody has it
            found.append(listen([port for port in range(wanted, wanted + 20) if port < 65536]))
    return found or [listen()]


def _says_something(sock: socket.socket) -> bool:
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _answer(sock: socket.socket) -> None:
    """One connection of a peer: `e` echoes, `s` takes what comes and says how much that was."""
    with contextlib.suppress(OSError, ValueError), sock:
        sock.settimeout(30.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = sock.recv(1)
        if kind == b"e":
            while data := sock.recv(_SMALL):
                sock.sendall(data)
        elif kind == b"s":
            _take(sock)


def _take(sock: socket.socket) -> None:
    """Read to the end; tell (bytes, seconds since the first of them) now and then."""
    buffer = bytearray(1 << 18)
    got, began, told = 0, 0.0, 0.0
    while True:
        size = sock.recv_into(buffer)
        now = time.perf_counter()
        if size and not got:
            began = told = now
            first = size
        got += size
        if got and (not size or now - told > _TELLS):
            told = now
            sock.sendall(struct.pack("!Qd", got - first, now - began))
        if not size:
            return


def _pingpong(sock: socket.socket, deadline: float) -> float:
    """Half of a round trip in microseconds: the median."""
    sock.sendall(b"e")
    data, times = bytes(_SMALL), []
    for _ in range(_PINGS):
        began = time.perf_counter()
        sock.sendall(data)
        left = _SMALL
        while left:
            part = sock.recv(left)
            if not part:
                raise ConnectionResetError
            left -= len(part)
        times.append((time.perf_counter() - began) * 1e6 / 2)
        if time.monotonic() > deadline:  # slow, and known well enough
            break
    return statistics.median(times)


def _send(sock: socket.socket, lasts: float, seconds: float) -> tuple[int, float, float]:
    """(bytes that arrived, seconds, share of the segments sent again)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.sendall(b"s")
    sock.setblocking(False)
    began = time.monotonic()
    heard, sent, open_ = bytearray(), 0, True
    while True:
        passed = time.monotonic() - began
        if open_ and passed > lasts:
            sock.shutdown(socket.SHUT_WR)
            open_ = False
        if passed > lasts + seconds:
            break
        limit = lasts - passed if open_ else lasts + seconds - passed
        readable, writable, _ = select.select([sock], [sock] if open_ else [], [], max(limit, 0.001))
        if writable:
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(_CHUNK)
        if readable:
            part = sock.recv(4096)
            if not part:
                break
            heard += part
    last = len(heard) // 16 * 16
    if not last:
        raise TimeoutError
    got, lasted = struct.unpack("!Qd", heard[last - 16 : last])
    return int(got), float(lasted), _again(sock, sent)


def _again(sock: socket.socket, sent: int) -> float:
    """Which share of the segments had to be sent again, by the kernel's own count (struct tcp_info)."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        size, again = struct.unpack_from("I", info, 16)[0], struct.unpack_from("I", info, 100)[0]
    except (OSError, AttributeError, struct.error):
        return 0.0
    return float(round(min(1.0, again / max(sent / max(size, 1), 1)), 5))


def work(wire: Wire) -> None:
    """The life of a worker; it ends with the process that looks after it."""
    try:
        PingWorker(wire).run()
    except Gone:
        return
    except Exception as exc:
        with contextlib.suppress(Gone):
            wire.send({"t": "broken", "why": json.dumps(f"{type(exc).__name__}: {exc}")[1:300]})
