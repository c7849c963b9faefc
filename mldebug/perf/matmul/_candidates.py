"""Which shapes are worth a try: seeds that fit the tiles and waves of a device, and the neighbours of a good one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mldebug.perf.matmul._blocks import Shape, flops_of

# Rows and columns of C that one block of threads of a GPU computes, as BLASes cut it.
_TILES = ((128, 256), (256, 128), (128, 128))
_FULL = 0.95  # of the multiprocessors that the last wave of tiles must use


@dataclass(frozen=True)
class Limits:
    """What a device can be asked: sizes are multiples of `step`, and a call takes from `least` to `most` FLOPs.

    `multiprocessors` is 1 where that has no meaning, as on a CPU.
    """

    step: int
    largest: int  # of m, n and k
    least: float
    most: float
    multiprocessors: int = 1

    def allows(self, shape: Shape) -> bool:
        return self.least <= flops_of(shape) <= self.most and all(self.step <= one <= self.largest for one in shape)


def limits_for(tflops: float, kind: str, multiprocessors: int = 1) -> Limits:
    """Limits for a device that does about so many TFLOPS: calls of 0.15 to 12 ms, on a CPU of 0.15 to 6 ms.

    Shorter ones are bound by their launch, longer ones leave too few in a block. limits_for(700, "cuda", 132)
    """
    quick, long = 1.5e-4, 6e-3 if kind == "cpu" else 12e-3
    step = 256 if tflops >= 20 else 64
    return Limits(step, 80 * step, tflops * 1e12 * quick, tflops * 1e12 * long, max(1, multiprocessors))


def reference_shape(limits: Limits) -> Shape:
    """The largest cube of a power of two that takes a fifth of the longest call at most: 8192 on an H100."""
    side = 2 ** int(math.log2((limits.most / 4 / 2) ** (1 / 3)))
    return (side, side, side)


def seeds(limits: Limits, known: Iterable[Shape], wanted: int) -> list[Shape]:
    """At most `wanted` shapes, always the same ones for a device, so that its runs start alike.

    The best known of any device, plain powers of two, shapes whose tiles make up whole waves exactly, and some that
    nearly do.
    """
    rng = random.Random(0)
    found: dict[Shape, None] = {}
    plain: list[Shape] = [
        (side * first, side * second, side * third)
        for side in (2**power for power in range(6, 15))
        for first, second, third in ((1, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 2, 2))
    ]
    waves = _whole_waves(limits)
    rng.shuffle(plain)
    rng.shuffle(waves)
    for some, share in ((known, 0.15), (plain, 0.3), (waves, 0.85)):
        for shape in some:
            if len(found) < share * wanted and limits.allows(shape):
                found[shape] = None
    for _ in range(200 * wanted):
        if len(found) >= wanted:
            break
        shape = _random(limits, rng)
        if limits.allows(shape) and fills_waves(shape, limits.multiprocessors):
            found[shape] = None
    return list(found)


def _whole_waves(limits: Limits) -> list[Shape]:
    """(m, n) that are cut into exactly one to eight tiles for each multiprocessor, with some depths."""
    if limits.multiprocessors < 2:
        return []
    found = []
    for rows, columns in _TILES[:2]:
        for waves in range(1, 9):
            tiles = waves * limits.multiprocessors
            for down in range(1, tiles + 1):
                m, n = down * rows, tiles // down * columns
                if tiles % down == 0 and max(m, n) <= 8 * min(m, n) and max(m, n) <= limits.largest:
                    found += [(m, n, k) for k in (4096, 6144, 8192, 10240, 13824, 16384)]
    return list(dict.fromkeys(found))


def neighbours_in(limits: Limits) -> Callable[[Shape], list[Shape]]:
    """The function that gives the neighbours of a shape: one size a little other, halved, doubled, or two exchanged."""

    def neighbours(shape: Shape) -> list[Shape]:
        m, n, k = shape
        found = [(n, m, k), (2 * m, n // 2, k), (m // 2, 2 * n, k), (2 * m, n, k // 2), (m, 2 * n, k // 2)]
        for place in range(3):
            size = shape[place]
            for other in (
                *(size + sign * many * limits.step for many in (1, 2, 4) for sign in (1, -1)), size * 2, size // 2,
                size * 3 // 2, size * 3 // 4,
            ):  # fmt: skip
                changed = [m, n, k]
                changed[place] = other
                found.append((changed[0], changed[1], changed[2]))
        return [one for one in dict.fromkeys(found) if one != shape and _whole(one, limits) and limits.allows(one)]

    return neighbours


def fills_waves(shape: Shape, multiprocessors: int) -> bool:
    """Whether the tiles of C, cut in one of the usual ways, leave few multiprocessors idle in their last wave."""
    m, n = shape[:2]
    for rows, columns in _TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        if tiles / (math.ceil(tiles / multiprocessors) * multiprocessors) >= _FULL:
            return True
    return False


def _random(limits: Limits, rng: random.Random) -> Shape:
    """Sizes whose logarithms are even, as twice the size is as different from it as half of it."""
    most = limits.largest // limits.step

    def size(least: int) -> int:
        return limits.step * round(math.exp(rng.uniform(math.log(least), math.log(most))))

    return (size(2), size(2), size(2))


def _whole(shape: Shape, limits: Limits) -> bool:
    return all(size % min(limits.step, 64) == 0 for size in shape)
