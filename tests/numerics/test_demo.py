"""The demo: a real run of the real class, the same each time, that ends where mT5's ended."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
import torch

from mldebug.numerics import _demo
from mldebug.numerics._demo import run_demo

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def told() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(told: list[str]) -> Any:
    return run_demo(told.append)


def test_the_feed_forward_overflows_and_is_named(report: Any) -> None:
    event = report.event
    assert event is not None
    assert (event.kind, event.phase, event.role, event.dtype) == ("inf", "forward", "output", "float16")
    assert event.module == "encoder.block.0.layer.1.DenseReluDense.wo"
    assert event.limit == 65504.0
    assert event.step >= 20, "it trains before it overflows"
    assert report.text().startswith("inf in the output of encoder.block.0.layer.1.DenseReluDense.wo")


def test_the_frames_show_what_went_in(report: Any) -> None:
    assert report.frames_from == "replay"
    last = report.frames[-1].splitlines()
    assert last[0].split() == ["encoder.block.0.layer.1.DenseReluDense.wo", "Linear"]
    assert [line.split()[-1] for line in last[1:]] == ["weight", "input[0]", "output"]
    assert last[-1].split()[1] == "inf"
    assert all(float(line.split()[1]) < 65504 for line in last[1:-1])


def test_it_learns_and_the_feed_forward_grows(report: Any, told: list[str]) -> None:
    lines = [line.split() for line in told if line.startswith("step")]
    losses = [float(line[3]) for line in lines]
    largest = [float(line[-1]) for line in lines]
    assert len(lines) >= 3
    assert all(map(math.isfinite, losses + largest))
    assert losses[-1] < losses[0] / 2
    assert largest[-1] > largest[0] * 1.5
    row = report.series[f"{report.event.module} output"]
    assert all(value < 65504 for _, value in row[:-1]), "nothing overflowed before"
    assert row[-1] == (report.event.batch, math.inf)


def test_it_is_the_same_each_time_and_leaves_nothing_behind(report: Any, monkeypatch: Any) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = run_demo()
    assert again.event == report.event
    assert again.history == report.history
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_ctrl_c_brings_what_was_seen_so_far() -> None:
    def interrupt(line: str) -> None:
        if line.startswith("step  10"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        run_demo(interrupt)
    report = stopped.value.report  # type: ignore[attr-defined]
    assert report.event is None
    assert report.batches == 11


def test_the_end_of_training_is_a_report_without_event(monkeypatch: Any) -> None:
    monkeypatch.setattr(_demo, "_STEPS", 2)
    report = run_demo()
    assert report.event is None
    assert report.batches == 2


def test_the_command(run_python: Any) -> None:
    begin = time.monotonic()
    done = run_python("-m", "mldebug", "demo", "--json", timeout=90)
    took = time.monotonic() - begin
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["event"]["module"] == "encoder.block.0.layer.1.DenseReluDense.wo"
    assert document["frames"]
    assert took < 60  # 8 s on two idle cores
