"""memory_report: one line that says what memory is in use, at a point of the program or around a part of it."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any, TextIO

from mldebug.core.errors import MldebugError
from mldebug.core.report import Report, jsonable, write
from mldebug.core.scope import Scope
from mldebug.perf.memory._card import used_device
from mldebug.perf.memory._host import reset_peak
from mldebug.perf.memory._reading import Reading, line_of, look


class memory_report(Scope, Report):
    """Prints one line with what memory is in use, and is the report of it; as a scope, also what a part of it took.

    Constructing it prints the line. `with` prints another one at the end, with the changes since its beginning in
    brackets and with the peak within. As a decorator it prints one line for each call. `@memory_report` without
    brackets takes the function's name as label, and prints nothing before the first call.
    Bytes: allocated (in tensors), its peak, reserved (taken from the driver by torch), fragmentation (the share of
    reserved that is free but in pieces of blocks in use: `inactive_split_bytes` of torch.cuda.memory_stats), what
    the driver sees on the whole card, other processes on the card, RSS, and the tightest memory limit of the cgroups
    around the process. On CUDA no context is made that is not there yet, and nothing waits for the device.
    A scope lets the peaks of torch.cuda and of the process begin anew, so that its own can be read.
    `file` is a stream, stderr by default; `ranks` which ranks print (default: all). What cannot be read (no GPU, no
    cgroup, no /proc) is left out of the line and None in the report; nothing is raised for it.

        memory_report("before the model is built")
        with memory_report("forward") as report:
            loss = model(batch).loss
        print(report.now.card.allocated, report.now.peak)
    """

    now: Reading  # of the last line
    before: Reading | None = None  # when the scope began

    def __new__(cls, label: Any = "", *, file: TextIO | None = None, ranks: Any = None) -> Any:
        self = Scope.__new__(cls)
        if callable(label):  # `@memory_report`: what comes back is the function, and so no __init__ follows
            self._begin(getattr(label, "__qualname__", type(label).__name__), file, ranks)
            return self(label)
        return self

    def __init__(self, label: Any = "", *, file: TextIO | None = None, ranks: Any = None) -> None:
        self._begin(str(label), file, ranks)
        self.now = look(self.label)
        self._print()

    def _begin(self, label: str, file: TextIO | None, ranks: Any) -> None:
        if isinstance(ranks, int):
            ranks = (ranks,)
        self.label, self._file, self._ranks = label, file, None if ranks is None else frozenset(ranks)

    def start(self) -> None:
        _peaks.enter(self)
        self.before = look(self.label)

    def stop(self, exc: BaseException | None) -> None:
        now = look(self.label)
        self.now = now.with_peak(_peaks.leave(self, now.peak))
        failed = exc is not None and not isinstance(exc, (GeneratorExit, StopIteration, StopAsyncIteration))
        self._print(f"left_by={type(exc).__name__}" if failed else "")

    def to_dict(self) -> dict[str, Any]:
        """Readings now and (of a scope) before, in bytes."""
        return {"schema": self.schema, "ok": self.ok, "now": jsonable(self.now), "before": jsonable(self.before)}

    def text(self, color: bool = False, width: int = 80) -> str:
        """The line. It is as long as it is: a line that is broken does not grep."""
        return line_of(self.now, self.before)

    def __repr__(self) -> str:
        return f"<memory_report {self.label!r}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _print(self, more: str = "") -> None:
        if self._ranks is not None and self.now.rank not in self._ranks:
            return
        with contextlib.suppress(MldebugError, OSError, ValueError):  # a full log is no reason to end the run
            write(line_of(self.now, self.before, more) + "\n", sys.stderr if self._file is None else self._file)


class _Peaks:
    """The open scopes. One that begins or ends lets the device's peak begin anew; what the others had seen is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, int] = {}  # id of an open scope -> the largest use that earlier counts have shown

    def enter(self, scope: memory_report) -> None:
        with self._lock:
            self._fold(look().peak)
            self._anew()
            self._seen[id(scope)] = 0

    def leave(self, scope: memory_report, peak: int | None) -> int | None:
        with self._lock:
            self._fold(peak)
            own = self._seen.pop(id(scope), 0)
            return max(own, peak) if peak is not None else None

    def _fold(self, peak: int | None) -> None:
        for key, value in self._seen.items():
            self._seen[key] = max(value, peak or 0)

    def _anew(self) -> None:
        device = used_device()
        if device is not None and device.kind in ("cuda", "rocm", "xpu"):
            device.module.reset_peak_memory_stats(device.index)
        elif device is None or device.kind == "cpu":
            reset_peak()


_peaks = _Peaks()
