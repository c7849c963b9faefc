"""What counts as growth: a leak under noise does, and nothing that a healthy loop does."""

from __future__ import annotations

import random

import pytest

from mldebug.perf.memory._growth import grows, thinned

STEPS = 38


def _noise(seed: int, count: int = STEPS) -> list[float]:
    draw = random.Random(seed)
    return [draw.randint(1_000, 2_000) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_with_noise_on_top(seed: int) -> None:
    sizes = [200 * step + 0.3 * noise for step, noise in enumerate(_noise(seed))]
    found = grows(sizes)
    assert found is not None and 150 < found < 250


def test_its_rate_is_the_median_slope() -> None:
    assert grows([100, 110, 120, 131, 140, 150, 160, 170]) == pytest.approx(10, abs=0.2)


def test_noise_is_never_growth() -> None:
    assert not [seed for seed in range(800) if grows(_noise(seed)) is not None]
    assert not [seed for seed in range(800) if grows(_noise(seed, 11)) is not None]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([5] * STEPS, id="flat"),
        pytest.param([min(step, 20) for step in range(STEPS)], id="a window of 20 that is full"),
        pytest.param([step % 10 for step in range(STEPS)], id="flushed every ten steps"),
        pytest.param([0] * 10 + [100] * (STEPS - 10), id="one step up"),
        pytest.param([100 - 100 * 0.8**step for step in range(STEPS)], id="flattens out"),
        pytest.param(list(range(7)), id="too few"),
        pytest.param(list(range(STEPS, 0, -1)), id="falls"),
    ],
)
def test_what_is_healthy(sizes: list[float]) -> None:
    assert grows(sizes) is None


def test_strict_forgives_no_step_down() -> None:
    sizes: list[float] = [float(step) for step in range(20)]
    assert grows(sizes, strict=True) == 1
    sizes[10], sizes[14] = sizes[14], sizes[10]
    assert grows(sizes, strict=True) is None and grows(sizes) is not None


def test_thinning_keeps_the_last() -> None:
    assert thinned(range(1000), 10)[-1] == 999 and len(thinned(range(1000), 10)) == 10
    assert thinned([1, 2], 10) == [1, 2]
