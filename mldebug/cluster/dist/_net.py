"""Interfaces of this host, and which address a backend of torch.distributed would give to the others."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldebug.cluster.dist._wire import resolve

_SIOCGIFADDR = 0x8915
_INNER = ("docker", "veth", "virbr", "cni", "flannel", "cali")  # lead to no other host


def interfaces() -> dict[str, dict[str, Any]]:
    """Name -> addresses, mtu and state of each interface of this process's network."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            found[name] = {"addresses": _v4(name), "mtu": _number(name, "mtu"), "state": _text(name, "operstate")}
    for line in _lines("/proc/net/if_inet6"):
        words = line.split()
        if len(words) == 6 and words[5] in found and words[3] == "00":  # global scope
            found[words[5]]["addresses"].append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return found


def backend_address(backend: str, env: Mapping[str, str] = os.environ) -> str:
    """The address under which the others would be told to find this process.

    gloo takes that of GLOO_SOCKET_IFNAME, else what the hostname resolves to if that is here, else loopback; NCCL takes
    the first interface that NCCL_SOCKET_IFNAME allows, InfiniBand's before others, and docker's and loopback last.
    """
    there = {name: told["addresses"] for name, told in interfaces().items() if told["addresses"]}
    if backend in ("nccl", "rccl"):
        allowed = [
            name for name in sorted(there, key=_rank_of) if allows(backend, env.get("NCCL_SOCKET_IFNAME", ""), name)
        ]
        return there[allowed[0]][0] if allowed else _of_hostname()
    if name := env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return there[name][0] if name in there else _of_hostname()
    return _of_hostname()


def _of_hostname() -> str:
    for address in resolve(socket.gethostname()):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            sock.bind((address, 0))
            return address
    return "127.0.0.1"


def _rank_of(name: str) -> tuple[int, int]:
    """As NCCL tries them: InfiniBand, others, docker, loopback; each in the order of the kernel."""
    kind = 0 if name.startswith("ib") else 2 if name.startswith("docker") else 3 if name == "lo" else 1
    with contextlib.suppress(OSError):
        return kind, socket.if_nametoindex(name)
    return kind, 0


def allows(backend: str, setting: str, name: str) -> bool:
    """What the settings mean: gloo's is a name; NCCL's are `eth,ib` prefixes, `=eth0` names, `^docker` all others."""
    if not setting:
        return True
    if backend not in ("nccl", "rccl"):
        return name == setting
    negative = setting.startswith("^")
    setting = setting.removeprefix("^")
    exact = setting.startswith("=")
    words = [word for word in setting.removeprefix("=").split(",") if word]
    hit = any(name == word.partition(":")[0] if exact else name.startswith(word.partition(":")[0]) for word in words)
    return hit != negative


def leads_nowhere(address: str, interface: str) -> str:
    """Why no other host can come to this address, or ""."""
    if address.startswith("127.") or address == "::1":
        return "a loopback address"
    if address.startswith("169.254.") or address.lower().startswith("fe80"):
        return "a link-local address"
    return f"the address of {interface}, which leads to no other host" if interface.startswith(_INNER) else ""


def _v4(name: str) -> list[str]:
    try:
        import fcntl
    except ImportError:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        told = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return [socket.inet_ntoa(told[20:24])]
    return []


def _text(name: str, what: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        return Path("/sys/class/net", name, what).read_text(encoding="ascii").strip()
    return ""


def _number(name: str, what: str) -> int:
    text = _text(name, what)
    return int(text) if text.isdecimal() else 0


def _lines(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    return []
