"""Files with wild contents: a report, or an error that says what is wrong, and never a traceback."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mldebug.core.errors import MldebugError
from mldebug.tracing._ring import SMALLEST, Layout, Ring
from mldebug.tracing._tail import trace_tail

_HEADS = st.sampled_from(
    [
        b"",
        b"# mldebug trace 1 host=a rank=0 world=4 pid=1 started=2026-03-01T12:00:00+00:00 argv=[]\n",
        b"# mldebug trace 1 host=a rank=9 world=99999999999999999999 pid=x started=nonsense args=1\n",
        b"# mldebug trace 1 world=999999999 parent=1 piece=7 started=9999-12-31T23:59:59\n",
    ]
)
_LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                b"0:00:01 a.py:     1: x = 1\n",
                b"0:00:02 a.py:     2: y = 1\n",
                b"        a:1 f\n",
                b"77 0:00:03 [t] a.py:     3: z\n",
                b"99999999999999999999999:00:00 a.py:1: x\n",
                b"\n",
                b"[",
                b"\r\n",
                b"\0\xff\n",
            ]
        ),
        st.binary(max_size=80),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_HEADS, _LINES), min_size=1, max_size=5), st.sampled_from([None, b".", b"x", b"^$", b"\\s+"]))
def test_any_bytes_are_read(files: list[tuple[bytes, list[bytes]]], pattern: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, (head, lines) in enumerate(files):
            data = head + b"".join(lines)
            Path(folder, f"trace-a-{rank}-{rank + 1}.txt").write_bytes(data)
            Path(folder, f"trace-a-{rank}-{rank + 1}.1.txt.gz").write_bytes(gzip.compress(data)[: len(lines) * 9 + 5])
        _read(folder, pattern)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, Layout(SMALLEST).end - 9), st.binary(min_size=1, max_size=8)), max_size=30))
@example([(4095, b"\x80")])  # a head beyond 63 bits
def test_any_ring_is_read(damage: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(folder, SMALLEST)
        ref = ring.define(b"a.py:     1: x")
        for number in range(500):
            ring.slots[number] = ring.last[0] = ref
            ring.head[0] = number
        data = bytearray(Path(ring.path).read_bytes())
        for at, new in damage:
            data[at : at + len(new)] = new
        for at, new in damage:  # more of it where it hurts
            data[at % 4096 : at % 4096 + len(new)] = new
        data[:24] = b"mldebug trace ring 1\n".ljust(24, b"\0")
        Path(ring.path).write_bytes(data)
        _read(folder, b"x")


def _read(folder: str, pattern: bytes | None) -> None:
    try:
        report = trace_tail(folder, pattern=None if pattern is None else pattern.decode())
    except MldebugError as exc:
        assert len(str(exc).splitlines()) == 2
        return
    text = report.text()
    assert max(map(len, text.splitlines())) <= 80 and "\0" not in text
    assert report.json()
