"""From a matrix over TCP to the host or path that is bad: unreachable, late, lossy or slow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import PairsEvidence
from mldebug.cluster.pairs._grid import Grid
from mldebug.cluster.pairs._search import Cause

_LATE, _LATE_US = 4.0, 400.0  # times the median and so many microseconds more: hosts that are busy answer late too
_LOST = 0.01  # share of the segments; hosts that are busy have some tenths of a per cent
_SLOW = 0.4  # of the median: how fast a stream is depends on who else computes
_MARK = 0.3  # what such a pair counts with; the others are equal


def plain(evidence: PairsEvidence) -> PairsEvidence:
    """The same with only two kinds of pairs, fine and bad: what TCP reaches is too noisy to be weighed."""
    gbps = [
        # The two directions are never quite equal, or they would be taken for one measurement.
        None if status != "ok" else (_MARK if bad else 1.0) * (1 + 1e-6 * (src < dst))
        for status, bad, (src, dst) in zip(evidence["status"], any_mark(evidence), _ends(evidence), strict=True)
    ]
    return {**evidence, "gbps": gbps}


def marks(evidence: PairsEvidence) -> tuple[Any, Any, Any]:
    """Which pairs are late, which lose segments, and which are slow: bool for each pair.

    The middle is that of all pairs; where they are few it is the better half's, as one host spoils half of the pairs
    of four.
    """
    latency, lost, gbps = (_column(evidence, key) for key in ("latency_us", "lost", "gbps"))
    usual, rate = _quantile(latency, 0.3), _quantile(gbps, 0.7)
    with np.errstate(invalid="ignore"):
        return (
            latency > max(_LATE * usual, usual + _LATE_US),
            lost > max(_LOST, 5 * _quantile(lost, 0.3)),
            gbps < _SLOW * rate,
        )


def any_mark(evidence: PairsEvidence) -> list[bool]:
    """Which pairs are one of the three."""
    late, lost, slow = marks(evidence)
    return [bool(one) for one in late | lost | slow]


def names_blamed(cells: Grid, evidence: PairsEvidence) -> list[Cause]:
    """Hosts that would tell others a wrong address: no pair of them need be bad."""
    found = []
    for entry in evidence.get("blame", []):
        if entry.get("what") == "name" and entry.get("gpu") in cells.hosts:
            node = cells.hosts.index(str(entry["gpu"]))
            own = np.zeros_like(cells.seen)
            own[node, :] = True
            pairs = np.flatnonzero((own & cells.measured).reshape(-1))
            found.append(Cause("node", (node,), True, "all", "both", pairs, -4.0, 12.0, str(entry["why"])))
    return found


def explained(cells: Grid, evidence: PairsEvidence, causes: list[Cause]) -> list[Cause]:
    """`causes` with what was seen in their pairs."""
    number = {name: place for place, name in enumerate(cells.names)}
    ends = [(number[evidence["gpus"][a]], number[evidence["gpus"][b]]) for a, b in _ends(evidence)]
    flat = np.array([one * cells.size + other for one, other in ends], dtype=np.int64)
    late, lost, slow = marks(evidence)
    told = []
    for cause in causes:
        own = np.isin(flat, cause.cells)
        why = _why(evidence, own, late, lost, slow)
        told.append(cause if cause.why or not why else replace(cause, why=_way(cause) + why))
    return told


def _why(evidence: PairsEvidence, own: Any, late: Any, lost: Any, slow: Any) -> str:
    whys = evidence.get("why") or []
    said = Counter(why for why, mine in zip(whys, own, strict=False) if mine and why)
    parts = [f"{why} ({count} pair{'s' if count > 1 else ''})" for why, count in said.most_common(2)]
    latency, share, gbps = (_column(evidence, key) for key in ("latency_us", "lost", "gbps"))
    for mask, values, text, quantile in (
        (late, latency, "half a round trip takes {}, usual is {}", 0.3),
        (slow, gbps, "a stream reaches {}, usual is {}", 0.7),
        (lost, share, "{} of its segments are sent again, usual is {}", 0.5),
    ):
        if (mask & own).any():
            show = _time if values is latency else _share if values is share else _rate
            parts.append(text.format(show(np.median(values[mask & own])), show(_quantile(values, quantile))))
    return "; ".join(parts)


def _way(cause: Cause) -> str:
    return {"tx": "what it sends: ", "rx": "what is sent to it: "}.get(cause.way, "") if cause.kind == "node" else ""


def _ends(evidence: PairsEvidence) -> list[tuple[int, int]]:
    return list(zip(evidence["src"], evidence["dst"], strict=True))


def _column(evidence: PairsEvidence, key: str) -> Any:
    values = evidence.get(key) or [None] * len(evidence["src"])
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)  # type: ignore[attr-defined]


def _quantile(values: Any, share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, share)) if len(known) else float("nan")


def _time(value: float) -> str:
    return f"{value / 1000:.1f} ms" if value >= 1000 else f"{value:.0f} us"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _rate(value: float) -> str:
    return f"{value:.2f} GBps" if value >= 0.1 else f"{value * 1000:.1f} MB/s"
