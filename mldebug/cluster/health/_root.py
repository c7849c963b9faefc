"""What doctor reads of a machine: files below a prefix, and the few things that are no files. Tests fake it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mldebug.core.machine import NotVisible, why_not
from mldebug.core.machine import Root as Files

__all__ = ["NotVisible", "Root", "within"]

_RESOLVE = 1.0  # seconds that looking up a host name may take
_SIOCGIFADDR = 0x8915

T = TypeVar("T")


class Root(Files):
    """The files of a machine, and what is no file. Everything raises NotVisible where it cannot be read.

    Root().read("/proc/sys/kernel/numa_balancing")  # "1"
    """

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def host(self) -> str:
        return socket.gethostname()

    def kernel(self) -> str:
        return platform.release()

    def space(self, path: str) -> tuple[int, int]:
        """Bytes of a file system, and how many of them are free."""
        try:
            found = os.statvfs(self.path(path))
        except OSError as exc:
            raise NotVisible(why_not(path, exc)) from exc
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def addresses(self) -> dict[str, list[str]]:
        """The IPv4 address of each network interface, in the kernel's order; IPv6 ones are in /proc/net/if_inet6."""
        import fcntl

        found: dict[str, list[str]] = {}
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                for _, name in socket.if_nameindex():
                    found[name] = []
                    with contextlib.suppress(OSError):  # this one has none
                        answer = fcntl.ioctl(asked, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                        found[name] = [socket.inet_ntoa(answer[20:24])]
        except OSError as exc:
            raise NotVisible(why_not("network interfaces", exc)) from exc
        return found

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host name."""

        def ask() -> list[str]:
            try:
                rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            except OSError as exc:
                raise NotVisible(f"{name} has no address: {(exc.strerror or str(exc)).lower()}") from exc
            return list(dict.fromkeys(str(row[4][0]) for row in rows))

        return within(_RESOLVE, ask, f"looking up {name}")

    def peek(self) -> str:
        """Whether a process may read the memory of a child of its own: "" or the reason why not."""
        try:
            child = subprocess.Popen(["sleep", "5"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as exc:
            raise NotVisible(f"cannot start a child to try it: {exc.strerror}") from exc
        try:
            return _peek(child.pid)
        finally:
            child.kill()
            child.wait()


def within(seconds: float, what: Callable[[], T], name: str) -> T:
    """The result of `what()`, which may hang: NotVisible then, and its thread is left to itself."""
    box: list[T | BaseException] = []

    def call() -> None:
        try:
            box.append(what())
        except BaseException as exc:
            box.append(exc)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise NotVisible(f"{name} gave no answer within {seconds:g} s")
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _peek(pid: int) -> str:
    """Read a byte of this process' memory map from outside, as py-spy does."""
    try:
        first = Path(f"/proc/{pid}/maps").read_text().split("-")[0]
    except OSError as exc:
        return (exc.strerror or str(exc)).lower()
    if not first:
        raise NotVisible("the child has no memory yet")
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is None:
        raise NotVisible("this C library has no process_vm_readv")
    buffer = ctypes.create_string_buffer(8)
    here = _Span(ctypes.cast(buffer, ctypes.c_void_p), 8)
    there = _Span(int(first, 16), 8)
    call.restype = ctypes.c_ssize_t
    got = call(pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0))
    return "" if got > 0 else os.strerror(ctypes.get_errno()).lower()
