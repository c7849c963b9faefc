"""Matrices of CPUs: noise makes no culprit, and hides none that fails or is much slower."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mldebug.cluster import PairsEvidence, load_pairs, pair_matrix, save_pairs
from mldebug.cluster.pairs._noise import suspicious
from mldebug.cluster.pairs._tasks import Task

ROOT = Path(__file__).resolve().parents[2]


def busy(seed: int, gpus: int = 8) -> PairsEvidence:
    """One host whose pairs reach anything between 45% and 180% of the usual, as CPUs do that others use too."""
    rng = random.Random(seed)
    ends = [(one, other) for one in range(gpus) for other in range(gpus) if one != other]
    return {
        "schema": 1, "gpus": [f"a:{gpu}" for gpu in range(gpus)], "src": [one for one, _ in ends],
        "dst": [other for _, other in ends], "gbps": [rng.choice((0.5, 0.9, 1.0, 1.1, 1.6)) for _ in ends],
        "status": ["ok"] * len(ends), "notes": [], "backend": "gloo",
    }  # fmt: skip


def test_noise_is_no_culprit() -> None:
    verdicts = [pair_matrix(busy(seed)).verdict for seed in range(20)]
    assert [verdict.culprits for verdict in verdicts] == [()] * 20


def test_a_wedged_pair_is_named_in_noise(tmp_path: Path) -> None:
    for seed in range(10):
        evidence = busy(seed)
        for at, ends in enumerate(zip(evidence["src"], evidence["dst"], strict=True)):
            if set(ends) == {2, 5}:
                evidence["gbps"][at], evidence["status"][at] = None, "hang"
        path = tmp_path / "busy.json"
        save_pairs(evidence, path)
        assert load_pairs(path).get("backend") == "gloo"
        assert pair_matrix(path).verdict.culprits == ("a:2 <-> a:5",)


def test_a_slow_one_is_named_in_noise() -> None:
    for seed in range(10):
        evidence = busy(seed)
        evidence["gbps"] = [
            0.1 if 3 in ends else gbps
            for gbps, ends in zip(evidence["gbps"], zip(evidence["src"], evidence["dst"], strict=True), strict=True)
        ]
        assert pair_matrix(evidence).verdict.culprits == ("a:3",)


def test_slow_ones_are_measured_again() -> None:
    tasks = [Task(number, (0, number), ("a:0", f"a:{number}")) for number in range(1, 6)]
    for task, rate in zip(tasks, (1.0, 1.1, 0.9, 0.5, 0.2), strict=True):
        task.gbps, task.latency = {0: rate, 1: rate}, {0: 9.0}
        task.close("ok", 1)
    assert suspicious(tasks) == [tasks[4], tasks[3]]
    fresh = Task(9, (0, 5), ("a:0", "a:5"), gbps={0: 0.1, 1: 1.2}, latency={0: 5.0})
    tasks[4].better(fresh)
    assert tasks[4].gbps == {0: 0.2, 1: 1.2} and tasks[4].latency == {0: 5.0}


@pytest.mark.timeout(500)
def test_beside_others_that_compute(tmp_path: Path) -> None:
    """Real workers, and as many busy processes as there are cores: nothing is bad.

    What else computes on this machine comes on top, at times in bursts of seconds, in which a pair really is slow:
    one run of three has to be without them.
    """
    pytest.importorskip("torch")
    out = tmp_path / "pairs.json"
    words = ("pairs", "--backend", "gloo", "--nproc", "4", "--bytes", "64K", "--json", "-o", str(out))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 2)]
    try:
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-m", "mldebug", *words],
                capture_output=True, text=True, timeout=150, check=False, env=env,
            )  # fmt: skip
            assert set(load_pairs(out)["status"]) == {"ok"}, done.stderr
            if done.returncode == 0:
                break
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_pairs(out).get("backend") == "gloo"
