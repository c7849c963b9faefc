"""The search for the fastest shape: many at first, neighbours of the good ones, and a duel of a few at the end.

Why it is not "the best of many means": a card under load sits at its power limit, and some five times a second it sets
its clock anew, by several percent, after the power of what ran before. The maximum of many means is then mostly luck.
So there are two ways to compare, one for each time scale:

- much shorter than that: slices of a few milliseconds of several shapes, in random order and with slices of a reference
  shape in between. All of them have the same clock, and their ratios are good to a few tenths of a percent.
- much longer: blocks of which each begins when the clock has come to what the power of this very shape allows.

The first finds the fast ones among hundreds in seconds, the second tells which of the best draw least. The figure that
is reported (`settle`) is measured at the end, and took no part in choosing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mldebug.perf.matmul._blocks import Ask, Block, Machine, Shape, ratios

_SLICE = 0.004  # seconds
_CYCLES = 3  # slices of a shape in a round
_TOGETHER = 6  # shapes that are sliced into each other
_AT_ONCE = 1.0  # seconds that are queued together: what Ctrl-C can lose
_FINALISTS = 8
_LAST = 4  # of them in the later rounds of the duel
_SETTLED = 0.4  # of a block of the duel, for the clock to settle; it does not count
_NEAR = 1.25  # two shapes all of whose sizes differ by less are alike

Note = Callable[[str, Block, "float | None"], None]


@dataclass
class Candidate:
    """What is known of a shape: its shares of the reference, in slices and in the duel."""

    shape: Shape
    shares: list[float] = field(default_factory=list)
    duel: list[float] = field(default_factory=list)
    level: int = 0  # the last round of the duel that it was in
    error: str = ""

    @property
    def share(self) -> float:
        """Its rate as a share of the reference's: the mean of the duel, else the median of its slices; 0.0 if unknown.

        The median, as a slice beside which the clock was set anew may be percents off.
        """
        if self.duel:
            return statistics.fmean(self.duel)
        return statistics.median(self.shares) if self.shares else 0.0

    @property
    def error_of_share(self) -> float:
        """The standard error of its share in the duel; infinite for one that was measured less than twice in it."""
        if len(self.duel) < 2:
            return math.inf
        return statistics.stdev(self.duel) / math.sqrt(len(self.duel))


class Search:
    """`run()` looks until its time is over; `best()` can be asked at any moment, also after an exception.

    `note(phase, block, share)` is called for each block as soon as it is measured.
    """

    def __init__(
        self,
        machine: Machine,
        reference: Shape,
        *,
        rng: random.Random,
        note: Note,
        neighbours: Callable[[Shape], list[Shape]],
    ) -> None:
        self._machine, self.reference = machine, reference
        self._rng, self._note, self._neighbours = rng, note, neighbours
        self.known: dict[Shape, Candidate] = {}
        self.reference_tflops: list[float] = []
        self.reference_races = True  # it may be the best itself

    def run(self, shapes: Sequence[Shape], until: float) -> None:
        """Slices of all, of the better ones, and of neighbours; then the duel. `until` is on the machine's clock."""
        began = self._machine.now()
        left = max(0.0, until - began)
        slices_until = began + 0.4 * left
        shapes = list(dict.fromkeys(shapes))
        self.each(shapes, "round 1", slices_until)
        self.each(self._top(shapes, max(_FINALISTS, len(shapes) // 3)), "round 2", slices_until)
        self._climb(slices_until)
        self.duel(self.finalists(), until)

    def best(self) -> Candidate | None:
        """The first of the ranking, or the reference itself where it takes part and none is faster."""
        ranked = self.ranking()
        if self.reference_races and self.reference_tflops and (not ranked or ranked[0].share < 1):
            return Candidate(self.reference, shares=[1.0], level=ranked[0].level if ranked else 0)
        return ranked[0] if ranked else None

    def estimate(self, one: Candidate) -> float:
        """The rate of a candidate, from its share and what the reference did last."""
        return one.share * statistics.median(self.reference_tflops[-5:]) if self.reference_tflops else 0.0

    def ranking(self) -> list[Candidate]:
        """All that have a share: those that got further in the duel first, then by share."""
        shares = {shape: one.share for shape, one in self.known.items() if not one.error}
        ranked = sorted(shares, key=lambda shape: (self.known[shape].level, shares[shape]), reverse=True)
        return [self.known[shape] for shape in ranked if shares[shape] > 0]

    def finalists(self) -> list[Candidate]:
        """The first of the ranking, leaving out what is like a better one: that would draw the same power."""
        found: list[Candidate] = []
        ranked = self.ranking()
        for one in ranked:
            if len(found) < _FINALISTS and not any(_alike(one.shape, other.shape) for other in found):
                found.append(one)
        return found or ranked[:1]

    def touch(self, shapes: Sequence[Shape]) -> None:
        """A first call of each, so that kernels are loaded and the times of calls are known; nothing counts."""
        for start in range(0, len(shapes), 16):
            for block in self._machine.run([Ask(shape, 1e-6, 1e-6) for shape in shapes[start : start + 16]]):
                if block.error:
                    self._fail(block)

    def each(self, shapes: Sequence[Shape], phase: str, until: float | None = None) -> None:
        """Slices of each, a few shapes at a time and in random order, with the reference around every two.

        After `until` what is left is left out: on a device that others use too a slice may last longer than it should.
        """
        left = [shape for shape in shapes if not self._known(shape).error and shape != self.reference]
        self._rng.shuffle(left)
        asks: list[Ask] = []
        reference = Ask(self.reference, 0.0, _SLICE)
        if not left:
            self._take(self._machine.run([reference] * _CYCLES), phase)
        for start in range(0, len(left), _TOGETHER):
            group = left[start : start + _TOGETHER]
            asks += [reference]
            for _ in range(_CYCLES):
                self._rng.shuffle(group)
                for place in range(0, len(group), 2):
                    asks += [*(Ask(shape, 0.0, _SLICE) for shape in group[place : place + 2]), reference]
            if len(asks) * _SLICE * 1.3 >= _AT_ONCE or start + _TOGETHER >= len(left):
                self._take(self._machine.run(asks), phase)
                asks = []
                if until is not None and self._machine.now() > until:
                    return

    def duel(self, finalists: Sequence[Candidate], until: float) -> None:
        """Long blocks, the reference among them, until the time is over: all once, then the best few again."""
        level = 0
        while finalists and (level == 0 or self._machine.now() < until):
            left = max(0.0, until - self._machine.now())
            turns = len(finalists) + 3
            if level == 0:  # and as much again for the second round, and for the one or two after it
                seconds = min(1.0, max(4 * _SLICE, left / (2.4 * turns + 4)))
            elif left < 0.6 * turns * seconds:
                return
            else:
                seconds = min(seconds, left / turns)
            level += 1
            order = [one.shape for one in finalists]
            self._rng.shuffle(order)
            order.insert(len(order) // 2, self.reference)
            asks = [
                Ask(shape, _SETTLED * seconds, (1 - _SETTLED) * seconds)
                for shape in (self.reference, *order, self.reference)
            ]
            self._take_long(self._machine.run(asks), level)
            best = self.ranking()
            finalists = [*best[:_LAST], *self._like(best[:2])] if level == 1 else best[:_LAST]

    def _like(self, tops: Sequence[Candidate]) -> list[Candidate]:
        """For each of these the next two by slices that are like it: of a family one was in the first round."""
        found: list[Candidate] = []
        for top in tops:
            kin = [one for one in self.ranking() if not one.level and one not in found and _alike(one.shape, top.shape)]
            found += kin[:2]
        return found

    def _climb(self, until: float) -> None:
        """Neighbours of the best few, sliced beside them; goes on from whichever is ahead then."""
        tried: set[Shape] = set()
        while self._machine.now() < until:
            tops = [one.shape for one in self.finalists()[:4]]
            fresh = [
                shape
                for top in tops
                for shape in self._neighbours(top)
                if shape not in self.known and shape not in tried and self._machine.fits(shape)
            ]
            fresh = list(dict.fromkeys(fresh))
            if not fresh:
                return
            self._rng.shuffle(fresh)
            fresh = fresh[:20]
            tried |= set(fresh)
            self.touch(fresh)
            self.each([*fresh, *tops], "climb", until)

    def _top(self, shapes: Sequence[Shape], count: int) -> list[Shape]:
        among = set(shapes)
        return [one.shape for one in self.ranking() if one.shape in among][:count]

    def _take_long(self, blocks: Sequence[Block], level: int) -> None:
        """Blocks of the duel: as shares of the mean of all blocks of the reference in the same round."""
        rates = [block.tflops for block in blocks if block.shape == self.reference and not block.error]
        unit = statistics.fmean(rates) if rates else 0.0
        self.reference_tflops += rates
        for block in blocks:
            share = None
            if block.error:
                self._fail(block)
            elif unit and block.shape != self.reference:
                share = block.tflops / unit
                one = self._known(block.shape)
                one.level = level
                one.duel.append(share)
            self._note("duel", block, share)

    def _take(self, blocks: Sequence[Block], phase: str) -> None:
        shares = {id(block): share for block, share in ratios(blocks, self.reference)}
        for block in blocks:
            share = shares.get(id(block))
            if block.error:
                self._fail(block)
            elif block.shape == self.reference:
                self.reference_tflops.append(block.tflops)
            elif share is not None:
                self._known(block.shape).shares.append(share)
            self._note(phase, block, share)

    def _known(self, shape: Shape) -> Candidate:
        return self.known.setdefault(shape, Candidate(shape))

    def _fail(self, block: Block) -> None:
        self._known(block.shape).error = block.error


def warm_up(machine: Machine, shape: Shape, least: float, until: float, note: Note) -> bool:
    """Load the device with one large shape until its rate no longer falls; whether that came before `until`.

    Flat means: the mean of the last three blocks is within 0.5% of that of the three before.
    """
    began = machine.now()
    rates: list[float] = []
    while machine.now() < until:
        blocks = machine.run([Ask(shape, 0.0, max(0.03, min(0.4, (until - began) / 8)))])
        for block in blocks:
            note("warm-up", block, None)
            if block.error:
                return False
            rates.append(block.tflops)
        if len(rates) >= 6 and machine.now() - began >= least:
            last, before = statistics.fmean(rates[-3:]), statistics.fmean(rates[-6:-3])
            if abs(last - before) < 0.005 * before:
                return True
    return False


def settle(machine: Machine, shape: Shape, seconds: float, note: Note) -> list[Block]:
    """The winner alone, the first quarter of the time to come to its own clock: blocks for the figure to report."""
    block = max(2 * _SLICE, seconds * 0.75 / 8)
    blocks: list[Block] = []
    for part in range(2):  # in two, back to back but for a moment, so that Ctrl-C loses one of them at most
        lead = seconds * 0.25 if part == 0 else 0.0
        found = machine.run([Ask(shape, lead, block), *(Ask(shape, 0.0, block) for _ in range(3))])
        for one in found:
            note("final", one, None)
        blocks += [one for one in found if not one.error]
    return blocks


def mean_rate(blocks: Sequence[Block]) -> float:
    """TFLOPS over all of these blocks: the clock swings around what the power limit allows, and this is its mean."""
    return sum(one.tflops * one.seconds for one in blocks) / sum(one.seconds for one in blocks)


def _alike(one: Shape, other: Shape) -> bool:
    return all(1 / _NEAR < a / b < _NEAR for a, b in zip(one, other, strict=False))
