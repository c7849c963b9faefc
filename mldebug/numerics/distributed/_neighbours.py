"""Which ranks of this host are gone, or stopped, without having said so: nobody need wait for them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

_LOOK = 0.2  # seconds between two looks
_STOPPED = 1.0  # seconds after which a stopped process is not waited for: a look at its stacks takes less


class Neighbours:
    """The processes of this host that take part in the side channel. All is done in the channel's thread.

    A process that died is counted as gone for all ranks, as if it had said so itself.
    """

    def __init__(self) -> None:
        self._home = _home()
        self._entered = False
        self._known: dict[int, str] = {}  # number -> process
        self._gone: set[int] = set()
        self._since: dict[int, float] = {}  # when each was first seen stopped
        self._next = 0.0

    def enter(self, store: Any) -> None:
        """Tell the others on this host of this process."""
        if not self._home:
            return
        number = store.add(f"{self._home}/count", 1)
        store.set(f"{self._home}/{number}", f"{os.getpid()} {_started(os.getpid())}")
        self._entered = True

    def look(self, store: Any) -> None:
        """See who is gone, or stopped, now."""
        now = time.monotonic()
        if not self._entered or now < self._next:
            return
        self._next = now + _LOOK
        for number in range(len(self._known) + 1, store.add(f"{self._home}/count", 0) + 1):
            if not store.check([f"{self._home}/{number}"]):
                break  # it is about to write that
            self._known[number] = store.get(f"{self._home}/{number}").decode()
        for number, process in self._known.items():
            if number in self._gone:
                continue
            pid, _, started = process.partition(" ")
            if _started(int(pid)) != started:
                self._gone.add(number)
                if store.add(f"{self._home}/{number}/gone", 1) == 1 and not store.check([f"left/{process}"]):
                    store.add("gone", 1)
            elif _state(int(pid)) == "T":
                self._since.setdefault(number, now)
            else:
                self._since.pop(number, None)

    def leave(self, store: Any) -> None:
        """This process says by itself that it goes: whoever sees it gone afterwards need not count it again."""
        if self._entered:
            store.set(f"left/{os.getpid()} {_started(os.getpid())}", "1")

    def stopped(self) -> int:
        """How many have been stopped (SIGSTOP, a debugger) for so long that nobody waits for them."""
        now = time.monotonic()
        return sum(now - since > _STOPPED for number, since in self._since.items() if number not in self._gone)


def _home() -> str:
    """This host as far as its processes can see each other: boot and namespace; "" where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"home/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return next(iter(_fields(pid)), "")


def _started(pid: int) -> str:
    """When a process was started, as the kernel counts; "" if it is gone, or only its entry is left."""
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else ""
