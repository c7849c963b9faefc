"""What was found while a cache filled is not said any more once it is full."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mldebug.perf.memory._process import Process


def test_growth_that_has_ended_is_taken_back() -> None:
    now = [0]
    process = Process(lambda: now[0])
    for step in range(1, 231):
        now[0] += 2 << 20 if step <= 60 else 64
        process.ended(step)
        if step == 82:  # the steps are judged several times
            process.judge()
            assert process.per_step is not None and "the process grew" in process.note
    process.judge()
    assert process.per_step is None and not process.note
