"""Loading in the same process is hidden by no step: whether that is trouble depends on its share of the time."""

from __future__ import annotations

import pytest

from mldebug.perf.loader._report import DataloaderReport, LoaderRow, Setting


def report(load: float, step: float, workers: int = 0) -> DataloaderReport:
    """Batches of 8 that are loaded in `load` seconds at best, by so many workers, and do not feed such steps."""
    setting = Setting(workers, 2 if workers else 0)
    row = LoaderRow(setting, 8 / load, 0.01, 3, 0.02, load, None, None)
    return DataloaderReport(
        rows=(row,), chosen=setting, now=None, gain=None, batch_samples=8, batch_bytes=64, device="cpu",
        step_seconds=step, enough_workers=None, waits=None, restart=None, resume=None, cpus=2, limits="", notes=(),
        seconds=5.0, complete=True,
    )  # fmt: skip


def test_a_loader_of_a_tenth_of_a_step_is_no_bottleneck() -> None:
    found = report(0.0284e-3, 0.233e-3)
    assert found.ok and found.beside == pytest.approx(0.109, abs=0.001)
    said = " ".join(found.text().split())
    assert "loading takes 0.0284 ms beside each step of 0.233 ms, 11% of the time" in said and "bottleneck" not in said


def test_a_third_of_the_time_is_trouble_and_said_as_it_is() -> None:
    found = report(0.05, 0.1)
    assert not found.ok and "50 ms beside each step of 100 ms, 33% of the time" in " ".join(found.text().split())


@pytest.mark.parametrize(("load", "workers"), [(0.2, 0), (0.2, 2), (0.11, 2)])
def test_what_is_slower_than_the_step_is_the_bottleneck(load: float, workers: int) -> None:
    found = report(load, 0.1, workers)
    assert not found.ok and "the loader is the bottleneck" in " ".join(found.text().split())
