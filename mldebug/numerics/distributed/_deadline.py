"""Ends a rank that cannot stop with the others, because it is inside a collective that will never be complete."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mldebug.numerics.distributed._together import Together

PATIENCE = 5.0  # seconds after the event
_STILL = 3.0  # seconds in which the thread that trains has not moved
_LOOK = 0.25
_REPORT = 1.5  # seconds that making the last report may take
_IDLE = 0.2  # share of a core below which a thread waits
# Modules whose calls wait for other ranks, where the interpreter stands still in one of them.
_WAITING = ("torch.distributed", "torch.nn.parallel")
_NO_COLLECTIVE = ("torch.distributed.checkpoint", "torch.distributed.elastic")


class Deadline(threading.Thread):
    """Runs from the moment an event is known until this rank has stopped for it."""

    def __init__(self, together: Together, turn: int) -> None:
        super().__init__(name="mldebug-deadline", daemon=True)
        self._together = together
        self._turn = turn
        self._mark: tuple[int, int] = (0, 0)
        self._still_since = (0.0, 0.0)  # by the clock, and in CPU time of the thread

    def run(self) -> None:
        together = self._together
        try:
            while not together.is_over(self._turn):
                if (where := self._stuck()) and together.leaving.acquire(blocking=False):
                    if not together.is_over(self._turn):
                        self._end(where)
                    together.leaving.release()
                time.sleep(_LOOK)
        except Exception:  # at the interpreter's end, most likely; nobody is stopped by a fault of ours
            return

    def _stuck(self) -> str:
        """The collective in which the rank waits, "" if it is not known to."""
        thread = self._together.thread
        frame = sys._current_frames().get(thread)
        if frame is None:
            return ""
        now, used, mark = time.monotonic(), _cpu_time(thread), (id(frame), frame.f_lasti)
        if mark != self._mark:
            self._mark, self._still_since = mark, (now, used)
            return ""
        still = now - self._still_since[0]
        if still < _STILL or now < self._together.replaying_until:
            return ""
        idle = used - self._still_since[1] < _IDLE * still
        # One that computes is given until somebody has stopped: then what it waits for will not come.
        since = self._together.since if idle else self._together.since_raised
        return _collective(frame, thread, idle, self._together.device) if since and now - since >= PATIENCE else ""

    def _end(self, where: str) -> None:
        """The report, a clear message, and the end of the process."""
        together = self._together
        first = together.first()
        who = "another rank" if first is None or first.rank == together.rank else f"rank {first.rank}"
        for user in list(together.users):
            writer = threading.Thread(target=user.ranks.write_last_report, daemon=True)
            writer.start()
            writer.join(_REPORT)
        seen = "after the event" if first is None else f"after rank {first.rank} saw the event"
        together.wait_for_others()
        _write(
            f"mldebug: rank {together.rank} ends here: {PATIENCE:.0f} s {seen} it was still inside a collective, "
            f"{where}, which {who} will not complete\nhint: its report is above; exit status 1\n"
        )
        os._exit(1)


def in_join(thread: int) -> bool:
    """Whether a thread has left the batches of a `with model.join()` and waits there for ranks that have more."""
    return any(
        frame.f_code.co_name == "__exit__" and frame.f_globals.get("__name__") == "torch.distributed.algorithms.join"
        for frame in _outwards(sys._current_frames().get(thread))
    )


def _write(text: str) -> None:
    with contextlib.suppress(Exception):  # closed or full
        sys.stderr.write(text)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _collective(frame: FrameType, thread: int, idle: bool, device: int | None) -> str:
    """Where a thread that stands still waits for other ranks: `all_reduce at train.py:31`; "" if it does not."""
    inner = str(frame.f_globals.get("__name__", ""))
    users = next((f for f in _outwards(frame) if not _is_torchs(f)), frame)
    name = next((f.f_code.co_name for f in _outwards(frame) if _called_by(f, users)), frame.f_code.co_name)
    if _begins(inner, _NO_COLLECTIVE) or inner.partition(".")[0] in sys.stdlib_module_names:  # a queue, a child
        return ""
    if not _begins(inner, _WAITING) and not (_waits_on_futex(thread) if idle else _device_is_busy(device)):
        return ""
    place = f"{Path(users.f_code.co_filename).name}:{users.f_lineno}"
    return place if name == users.f_code.co_name else f"{name} at {place}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _called_by(frame: FrameType, users: FrameType) -> bool:
    """Whether this is what the user's line called, past wrappers."""
    return frame.f_back is users or (frame.f_back is not None and frame.f_back.f_back is users)


def _is_torchs(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "mldebug", "contextlib", "functools")


def _begins(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _native(thread: int) -> int:
    if thread == threading.main_thread().ident:
        return os.getpid()  # after a fork older Pythons give the number of the parent's thread
    return next((t.native_id or 0 for t in threading.enumerate() if t.ident == thread), 0)


def _cpu_time(thread: int) -> float:
    """Seconds of CPU that a thread has used; 0 where the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{_native(thread)}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _waits_on_futex(thread: int) -> bool:
    """Whether the thread sleeps on a condition, as gloo waits, and not for a file, a child or a clock."""
    try:
        return "futex" in Path(f"/proc/self/task/{_native(thread)}/wchan").read_text()
    except OSError:
        return False


def _device_is_busy(device: int | None) -> bool:
    """Whether there is work on the device that does not end: a thread that waits for it uses its core."""
    cuda: Any = torch.cuda
    if device is None:
        return False
    cuda.set_device(device)  # of this thread, which else would wake up the first device of the node
    return not cuda.current_stream().query()
