"""What grows without a place in a step that makes tensors: arrays of numpy, models, optimizers, and forwards alone."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.perf.memory import _process
from mldebug.perf.memory._process import Process

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("small_heap")
PROGRAM = Path(__file__).parent / "programs" / "grow_host.py"
KINDS = ("numpy=150", "models=30", "optimizers=30", "graphs=30", "results=30", "rollout=1500")


@pytest.fixture(scope="module")
def seen(run_torch: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """The report of each kind, and what was said while it ran."""
    done = run_torch(PROGRAM, *KINDS, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=180)
    assert done.returncode == 0, done.stderr
    found = {told["kind"]: told for told in map(json.loads, done.stdout.splitlines())}
    for part in done.stderr.split(" begins\n")[0:-1]:
        assert part.splitlines()[-1] in found
    said = done.stderr.split(" begins\n")[1:]
    return {kind: {**found[kind], "said": words} for kind, words in zip(found, said, strict=True)}


def test_arrays_of_numpy_are_a_leak_with_the_name_of_the_list(seen: dict[str, Any]) -> None:
    told = seen["numpy"]
    assert not told["ok"] and told["leak"] is None
    leak = told["host_leak"]
    assert (leak["name"], leak["kind"], leak["item"]) == ("`history['arrays']` in run()", "list", "ndarray")
    assert 400 << 10 < leak["per_step"] < 800 << 10 and 512 << 10 <= leak["item_bytes"] < 520 << 10
    assert "more of the host's memory after" in told["text"] and max(map(len, told["text"].splitlines())) <= 80


@pytest.mark.parametrize("kind", ["models", "optimizers"])
def test_what_comes_with_each_step_and_stays(seen: dict[str, Any], kind: str) -> None:
    told = seen[kind]
    assert not told["ok"] and told["steps"] == 30
    assert told["leak"]["holder"]["name"] == "`kept` in run()"
    assert "memory grows by" in told["said"] and "grow_host.py" in told["said"]


def test_predictions_that_keep_their_graph(seen: dict[str, Any]) -> None:
    told = seen["graphs"]
    assert not told["ok"] and told["step_is"] == "forward"
    assert told["leak"]["holder"]["graph"] and told["leak"]["per_step"] >= 2 * 64 * 64 * 4
    assert "memory grows" not in told["said"]  # a training may be about to begin


def test_the_results_of_a_test_set_are_a_note(seen: dict[str, Any]) -> None:
    told = seen["results"]
    assert told["ok"] and told["leak"] is None
    assert told["results"] == 64 * 64 * 4
    assert any("are kept by `kept` in run() after each forward" in note for note in told["notes"])


def test_rollouts_that_are_emptied_are_no_leak(seen: dict[str, Any]) -> None:
    told = seen["rollout"]
    assert told["ok"] and told["step_is"] == "optimizer step"
    assert told["judged"] >= 20 and "memory grows" not in told["said"]


def of_growth(per_step: list[int], fill: Any) -> Process:
    """A process that grows by these bytes; `fill` is called with each step."""
    now = [0]
    process = Process(lambda: now[0])
    for step, more in enumerate(per_step, 1):
        now[0] += more
        fill(step)
        process.ended(step)
    process.judge()
    return process


def test_a_cache_that_is_full_is_no_leak() -> None:
    cache: dict[int, bytes] = {}

    def fill(step: int) -> None:
        cache[step % 150] = bytes(1 << 20)

    process = of_growth([1 << 20] * 150 + [0] * 250, fill)
    assert process.leak is None and process.per_step is None


def test_a_deque_with_a_bound_is_no_leak_while_it_fills() -> None:
    replay: collections.deque[bytes] = collections.deque(maxlen=100_000)
    process = of_growth([1 << 20] * 150, lambda step: replay.append(bytes(1 << 20)))
    assert process.leak is None and "`replay` in test_a_deque" in process.note
    assert process.note.endswith("fills up to 100000, and is no leak")


def test_growth_that_no_container_explains_is_told_and_is_no_verdict() -> None:
    numbers: list[float] = []
    process = of_growth([1 << 20] * 150, lambda step: numbers.append(step / 3))  # a log of small numbers
    assert process.leak is None and process.per_step == pytest.approx(1 << 20, rel=0.05)
    assert "the process grew by 10" in process.note and "over 150 steps" in process.note


def test_containers_are_looked_at_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    real = _process._containers
    monkeypatch.setattr(_process, "_containers", lambda least: looks.append(least) or real(least))
    of_growth([1 << 20] * 2000, lambda step: None)
    assert 2 <= len(looks) <= 12
