"""trace_tail() on the traces of real processes: four ranks of one loop, of which three do something else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mldebug.tracing import trace_tail

ROOT = Path(__file__).resolve().parents[2]
_TRAIN = """\
import os, signal, threading, time

rank = int(os.environ["RANK"])
noise = threading.Event()


def other_thread():
    while not noise.wait(0.001 * (rank + 1)):
        pass


def forward(step):
    x = step * 2
    return x + 1


def train(steps):
    for step in range(steps):
        loss = forward(step)
        if odd(1, step, 7):
            loss = -loss
        if odd(2, step, 15):
            break
        if odd(3, step, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
    return step


def odd(*what):
    return what == (rank, what[1], what[1]) and what[1] == what[2]


thread = threading.Thread(target=other_thread, name="noise")
thread.start()
train(40)
noise.set()
thread.join()
"""
_RUN = """
    import runpy, sys
    from mldebug.tracing import NicerTrace
    ring = {"ring": 1 << 20} if sys.argv[1] == "ring" else {}
    with NicerTrace(output=sys.argv[2], **ring):
        runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.parametrize("kind", ["txt", "ring"])
def test_three_odd_ranks_of_four_are_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_RUN), kind, "traces"],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 0, -9]
    report = trace_tail(tmp_path / "traces", pattern="return x")
    numbers = {text.strip(): number for number, text in enumerate(_TRAIN.splitlines(), 1)}
    assert [(parting.place, parting.iteration) for parting in report.partings] == [
        (f"train.py:{numbers['if odd(1, step, 7):']}", 7),
        (f"train.py:{numbers['if odd(2, step, 15):']}", 15),
        (f"train.py:{numbers['if odd(3, step, 20):']}", 20),
    ]
    assert all(parting.call.endswith(" train") and not parting.expected for parting in report.partings)
    assert not report.partings[2].meets
    ways = [[(way.ranks, way.line.split(":", 2)[2].strip()) for way in parting.ways] for parting in report.partings]
    assert ways[0] == [((1,), "loss = -loss"), ((0, 2, 3), "if odd(2, step, 15):")]
    assert ways[1][0] == ((2,), "break") and ways[2][0] == ((3,), "os.kill(os.getpid(), signal.SIGKILL)")
    assert [rank.matches for rank in report.ranks] == [40, 40, 16, 21]
    assert [rank.in_order for rank in report.ranks] == [True, True, True, False]
    assert "os.kill" in report.ranks[3].lines[-1]
    assert not report.ok
