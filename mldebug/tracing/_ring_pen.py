"""Stores the lines of a trace in a ring of memory that outlives the process."""

from __future__ import annotations

import threading
from _thread import get_ident
from collections.abc import Callable
from time import monotonic, monotonic_ns
from types import CodeType

from mldebug.tracing._code import Lines
from mldebug.tracing._pen import LineCallback, _thread_name
from mldebug.tracing._ring import THREAD_SHIFT, TIME, Ring


class RingPen:
    """A line is two or three stores. The reader shows the call again where the thread or the call changes."""

    line: LineCallback
    left: Callable[..., None]
    _record: Callable[[int], None]

    def __init__(self, ring: Ring, failed: Callable[[Exception], None]) -> None:
        self.codes: dict[int, Lines] = {}
        self._ring, self._failed = ring, failed
        self._calls: dict[int, int] = {}  # id of the code -> ref of its call
        self._threads: dict[int, tuple[str, int]] = {}
        self._known: dict[tuple[bytes, int, bool], int] = {}  # what exec makes again and again is stored once
        self._begin()

    @property
    def path(self) -> str:
        return self._ring.path

    def encode(self, lines: Lines, line: int, text: bytes) -> int:
        ref = self._define(text, self._call(lines), True)
        if ref:
            lines[line] = ref
            return ref
        return self._ring.value(text, self._call(lines))

    def call(self, lines: Lines, words: str) -> None:
        if words:
            self._record(self._ring.value(lines.call + words.encode("utf-8", "backslashreplace"), timed=False))
        else:
            self._record(self._call(lines))

    def event(self, lines: Lines, line: int, words: str) -> None:
        self._record(self._ring.value(lines.at(line, words), self._call(lines)))

    def after_fork(self) -> None:
        self._ring.after_fork()
        self._calls.clear()
        self._threads.clear()
        self._known.clear()
        for lines in list(self.codes.values()):
            lines.clear()
        self._begin()

    def end(self) -> None:
        self._ring.close()

    def close(self) -> None:
        self._ring.close()

    def forget(self, key: int) -> None:
        """The code object with this id is no more."""
        self._calls.pop(key, None)

    def _call(self, lines: Lines) -> int:
        ref = self._calls.get(lines.key, 0)
        if not ref:
            ref = self._define(lines.call, 0, False)
            if ref:
                self._calls[lines.key] = ref
            else:
                ref = self._ring.value(lines.call, timed=False)
        return ref

    def _define(self, text: bytes, context: int, timed: bool) -> int:
        key = text, context, timed
        ref = self._known.get(key)
        if ref is None:
            ref = self._ring.define(text, context, timed)
            if ref:
                self._known[key] = ref
        return ref

    def _thread(self, ident: int) -> int:
        """The index of a thread; a thread that has the id of one that ended is another one by its name."""
        name = _thread_name(ident)
        known = self._threads.get(ident)
        if known is None or known[0] != name:
            known = self._threads[ident] = name, self._ring.thread(name)
        return known[1]

    def _begin(self) -> None:
        ring = self._ring
        slots, last, head, mask, codes = ring.slots, ring.last, ring.head, ring.mask, self.codes
        main = threading.main_thread().ident
        if main is not None:
            self._thread(main)  # it has index 0
        count = 0
        tick = 0.0  # when the clock of the records goes on: 2**20 ns, about a millisecond
        bases: dict[int, tuple[int, memoryview]] = {}  # of each thread, for this tick: time and thread, its last record
        gone = False  # a frame was left: the call of the next line is shown again
        call, thread_index, failed = self._call, self._thread, self._failed

        def base(ident: int) -> tuple[int, memoryview]:
            index = thread_index(ident)
            made = (monotonic_ns() << 12 & TIME) | index << THREAD_SHIFT, last[index : index + 1]
            bases[ident] = made
            return made

        def line(code: CodeType, number: int) -> None:
            nonlocal count, tick, gone
            try:
                lines = codes[id(code)]
                ref = lines[number]
                if monotonic() >= tick:
                    tick = monotonic() + 0.001
                    bases.clear()
                    if gone:
                        gone = False
                        record(call(lines))
                ident = get_ident()
                if ident in bases:
                    time, mine = bases[ident]
                else:
                    time, mine = base(ident)
                # No switch to another thread from here on: there is no call and no jump.
                slots[count & mask] = mine[0] = time | ref
                head[0] = count
                count += 1
            except Exception as exc:
                failed(exc)

        def record(ref: int) -> None:
            nonlocal count, gone
            time, mine = base(get_ident())
            gone = False
            slots[count & mask] = mine[0] = time | ref
            head[0] = count
            count += 1

        def left(_code: object = None, _offset: object = 0, _value: object = None) -> None:
            nonlocal tick, gone
            tick, gone = 0.0, True

        self.line, self.left, self._record = line, left, record
