"""A program of forwards alone has no steps, and is not told that some of none were looked at."""

from __future__ import annotations

import torch

from mldebug.perf.memory._watch import memory_watch


def test_forwards_alone() -> None:
    net = torch.nn.Linear(8, 8)
    with memory_watch(quiet=True) as watch, torch.no_grad():
        for _ in range(45):
            net(torch.ones(4, 8)).numpy()
    report = watch.report
    assert report.ok and report.steps == 0 and report.judged == 39
    assert "forwards alone, no leak above 4.0KiB a forward in 39 that" in " ".join(report.text().split())
