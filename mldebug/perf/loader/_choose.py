"""Which setting is enough: rates as training would see them, the noise of the rounds, the smallest within 3%."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mldebug.perf.loader._report import Setting

WITHIN = 0.97  # of the best is as good as the best


def useful(setting: Setting, rate: float, samples: float, step: float | None) -> float:
    """Samples a second that training gets: the slower of loader and step, which take turns without workers."""
    if not rate or step is None:
        return rate
    load = samples / rate
    return samples / (step + load) if not setting.num_workers else samples / max(step, load)


def smallest(rates: Mapping[Setting, float], samples: float, step: float | None) -> Setting | None:
    """The smallest setting whose useful rate is within 3% of the best one."""
    useful_rates = {one: useful(one, rate, samples, step) for one, rate in rates.items() if rate}
    best = max(useful_rates.values(), default=0.0)
    enough = [one for one, rate in useful_rates.items() if rate >= WITHIN * best]
    return min(enough, default=None)


def spread(rates: Sequence[float]) -> float:
    """Half of the range, as a share of the median."""
    middle = statistics.median(rates)
    return (max(rates) - min(rates)) / 2 / middle if middle else 0.0


def contenders(rates: Mapping[Setting, Sequence[float]], samples: float, step: float | None) -> list[Setting]:
    """The settings that more rounds may yet make the answer: the best, smaller ones that noise leaves near it, and
    larger ones that it may have hidden."""
    middle = _middle(rates, samples, step)
    if not middle:
        return []
    best = max(middle, key=lambda one: middle[one])
    known = [spread(seen) for seen in rates.values() if len(seen) > 1]
    unknown = max(0.1, *known) if known else 0.1  # one measurement does not tell its noise
    noise = {one: spread(seen) if len(seen) > 1 else unknown for one, seen in rates.items()}
    return [
        one
        for one, rate in middle.items()
        if one == best or rate * (1 + noise[one] + noise[best]) >= _edge(one, best, middle[best])
    ]


def is_settled(rates: Mapping[Setting, Sequence[float]], samples: float, step: float | None) -> bool:
    """Whether the answer would be the same if each rate were off by its noise: then no more rounds are needed."""
    open_ = contenders(rates, samples, step)
    if len(open_) < 2:
        return True
    if any(len(rates[one]) < 3 for one in open_):
        return False
    middle = _middle({one: rates[one] for one in open_}, samples, step)
    best = max(middle, key=lambda one: middle[one])
    # The uncertainty of a median falls with the rounds.
    unsure = {one: spread(rates[one]) / len(rates[one]) ** 0.5 * middle[one] for one in open_}
    return all(abs(middle[one] - _edge(one, best, middle[best])) > unsure[one] for one in open_ if one != best)


def _middle(rates: Mapping[Setting, Sequence[float]], samples: float, step: float | None) -> dict[Setting, float]:
    return {one: useful(one, statistics.median(seen), samples, step) for one, seen in rates.items() if seen}


def _edge(one: Setting, best: Setting, rate: float) -> float:
    """The rate from which on this setting would be the answer in the place of the best one."""
    return WITHIN * rate if one < best else rate / WITHIN
