"""The ring: the last lines of each thread, in a file that never grows."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mldebug.core.errors import UsageError
from mldebug.tracing._ring import SMALLEST, TIME, Ring
from mldebug.tracing._ring_read import RingReader, read_ring


class Writer:
    """What the tracer does for each line."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.counter = ring, itertools.count()

    def line(self, thread: int, ref: int) -> None:
        n = next(self.counter)
        self.ring.slots[n & self.ring.mask] = self.ring.last[thread] = (
            (time.monotonic_ns() << 12 & TIME) | thread << 22 | ref
        )
        self.ring.head[0] = n


def test_lines_come_back_with_their_calls(tmp_path: Path) -> None:
    ring = Ring(tmp_path, SMALLEST)
    writer, thread = Writer(ring), ring.thread("MainThread")
    outer, inner = ring.define(b"        a:1 outer", timed=False), ring.define(b"        a:9 inner", timed=False)
    one, two = ring.define(b"a.py:     2: x = 1", outer), ring.define(b"a.py:    10: y = 1", inner)
    for ref in (outer, one, one, inner, two, one):
        writer.line(thread, ref)
    assert list(read_ring(ring.path))[1:] == [
        b"        a:1 outer",
        b"0:00:00 a.py:     2: x = 1",
        b"0:00:00 a.py:     2: x = 1",
        b"        a:9 inner",
        b"0:00:00 a.py:    10: y = 1",
        b"        a:1 outer",
        b"0:00:00 a.py:     2: x = 1",
    ]


def test_the_oldest_lines_go_and_an_idle_threads_last_line_stays(tmp_path: Path) -> None:
    ring = Ring(tmp_path, SMALLEST, threads=True)
    writer, main, idle = Writer(ring), ring.thread("MainThread"), ring.thread("idle")
    refs = [ring.define(b"a.py:%6d: x" % number) for number in range(1000)]
    writer.line(idle, refs[7])
    size = os.path.getsize(ring.path)
    total = ring.mask + 1 + 12_345
    for number in range(total):
        writer.line(main, refs[number % 1000])
    lines = list(read_ring(ring.path))[1:]
    assert lines[0].endswith(b" [idle] a.py:     7: x")
    numbers = [int(line.split(b":")[-2]) for line in lines[1:]]
    assert numbers == [number % 1000 for number in range(total - ring.mask - 1, total)]
    assert os.path.getsize(ring.path) == size
    reader = RingReader(ring.path)
    assert [line.split(b":")[-2].strip() for line in reader.lines(last=3)][-3:] == [b"878", b"879", b"880"]
    reader.close()


def test_texts_without_end_do_not_grow_the_file(tmp_path: Path) -> None:
    ring = Ring(tmp_path, SMALLEST)
    writer, thread = Writer(ring), ring.thread("MainThread")
    size, refused = os.path.getsize(ring.path), 0
    for number in range(20_000):
        text = b"exec:%6d: value %s" % (number, b"x" * 50)
        ref = ring.define(text)
        refused += ref == 0
        writer.line(thread, ref or ring.value(text))
    assert refused > 10_000 and os.path.getsize(ring.path) == size
    lines = list(read_ring(ring.path))[1:]
    numbers = [int(line.split(b":")[3]) for line in lines if b"overwritten" not in line]
    assert numbers[-1] == 19_999 and numbers[-1000:] == list(range(19_000, 20_000))
    assert numbers == sorted(numbers) and len(lines) == 20_000  # none shows the text of another


def test_a_ring_too_small_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a ring of 5 bytes is too small"):
        Ring(tmp_path, 5)


def test_no_room_on_the_disk_is_a_warning_and_an_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError):
        Ring(tmp_path, SMALLEST)
    said = capfd.readouterr().err
    assert "mldebug: no ring of 1 MiB in" in said and "goes on without a trace" in said
    assert os.listdir(tmp_path) == []


def test_a_signal_handler_that_waits_for_a_thread_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Wherever in define() and value() of the main thread it comes in, and no text is of two."""
    ring = Ring(tmp_path, 64 << 20)
    stored: dict[int, bytes] = {}
    waited: list[bool] = []

    def store(name: str, count: int) -> None:
        for number in range(count):
            text = f"{name} {number}".encode()
            stored[ring.define(text)] = text
            stored[ring.value(text)] = text
            ring.thread(name)

    def handler(*_: object) -> None:
        thread = threading.Thread(target=store, args=(f"thread {len(waited)}", 20), daemon=True)
        thread.start()
        thread.join(5)
        waited.append(thread.is_alive())

    before = signal.signal(signal.SIGVTALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
        number = 0
        while len(waited) < 120 and not any(waited):
            store(f"main {number}", 10)
            number += 1
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert not any(waited)
    reader = RingReader(ring.path)
    wrong = [ref for ref, text in stored.items() if (reader.text(ref) or (b"",))[0] != text]
    assert len(stored) == 2 * (number * 10 + 120 * 20) and wrong == []
    reader.close()
