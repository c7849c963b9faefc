"""The pairs as matrices, with the GPUs in the order of their nodes and rails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from mldebug.cluster.pairs._evidence import FAILED, PairsEvidence

# How far apart the highest and lowest of so many measurements are, in standard deviations.
_COUNTS, _SPANS = (2, 3, 4, 5, 7, 10, 20, 50), (1.13, 1.69, 2.06, 2.33, 2.70, 3.08, 3.73, 4.50)
_FLAPS = 0.3  # the least fall between two measurements of one pair, as a logarithm, that is no noise


@dataclass(frozen=True)
class Grid:
    """`rate[i, j]` is the logarithm of the bandwidth from GPU i to GPU j, NaN where there is none.

    GPUs are ordered by node and rail. A rail is what GPUs of different nodes share when they have the same place in
    their nodes; `failed[i, j]` is 0, or 1 + the place of its status in FAILED; `flaps[i, j]` says that the pair was
    measured many times and was bad in some; `well[i, j]` that it ended well, with a bandwidth or without;
    `seen[i, j]` that it is in the evidence, and nobody left it out; `twin[i, j]` that it is the measurement from j to i
    once more, and counts there.
    """

    names: list[str]
    hosts: list[str]
    node: Any  # int array, for each GPU
    rail: Any
    rails: list[str]  # a label for each rail
    rate: Any
    failed: Any
    flaps: Any
    well: Any
    seen: Any
    twin: Any

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def measured(self) -> Any:
        """Which pairs ended well or badly: bool."""
        return self.well | (self.failed > 0)

    def members(self, node: int) -> Any:
        return np.flatnonzero(self.node == node)


def grid(evidence: PairsEvidence) -> Grid:
    """The matrices of `evidence`; pairs of a GPU with itself are left out."""
    names, hosts, node, rail, rails, place = _layout(evidence["gpus"])
    size = len(names)
    src = place[np.asarray(evidence["src"], dtype=np.int64)] if size else np.zeros(0, dtype=np.int64)
    dst = place[np.asarray(evidence["dst"], dtype=np.int64)] if size else np.zeros(0, dtype=np.int64)
    gbps = np.array([np.nan if value is None else value for value in evidence["gbps"]], dtype=np.float64)
    codes = {status: code for code, status in enumerate(FAILED, 1)} | {"ok": 0, "missing": -1, "skipped": -2}
    code = np.array([codes[status] for status in evidence["status"]], dtype=np.int8)
    keep = src != dst
    src, dst, gbps, code = src[keep], dst[keep], gbps[keep], code[keep]
    gbps[~np.isfinite(gbps) | (gbps < 0)] = np.nan
    with np.errstate(divide="ignore"):
        value = np.where(code == 0, np.log(np.maximum(gbps, 1e-9)), np.nan)
    code = np.where((code == 0) & (gbps <= 1e-9), 1 + FAILED.index("error"), code)  # it ended, and moved nothing
    value[code != 0] = np.nan
    rate = np.full(size * size, np.nan)
    failed = np.zeros(size * size, dtype=np.int8)
    flaps = np.zeros(size * size, dtype=bool)
    seen = np.zeros(size * size, dtype=bool)
    well = np.zeros(size * size, dtype=bool)
    key = src * size + dst
    seen[key[code != -2]] = True
    np.maximum.at(failed, key, np.maximum(code, 0))
    _fold(key, value, failed, rate, flaps)
    well[key[code == 0]] = True
    well[failed > 0] = False
    shape = (size, size)
    well = well.reshape(shape)
    rate, failed, flaps, seen = rate.reshape(shape), failed.reshape(shape), flaps.reshape(shape), seen.reshape(shape)
    rate[failed > 0] = np.nan
    twin = _one_way(rate, well)
    return Grid(names, hosts, node, rail, rails, rate, failed, flaps, well, seen, twin)


def _fold(key: Any, value: Any, failed: Any, rate: Any, flaps: Any) -> None:
    """The median of what was measured of each pair; the worst, where the pair is bad now and then."""
    good = np.isfinite(value)
    key, value = key[good], value[good]
    flaps[key[failed[key] > 0]] = True  # it ended well at least once
    order = np.lexsort((value, key))
    key, value = key[order], value[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, dtype=np.int64)
    count = np.diff(np.r_[first, len(key)])
    middle = value[first + count // 2]
    low = value[first]
    if len(count) and count.max() > 1:
        many = count > 1
        span = value[first + count - 1] - low
        spread = float(np.median((span / np.interp(count, _COUNTS, _SPANS))[many]))
        flapping = many & (span > max(_FLAPS, 8 * spread))
        flaps[key[first[flapping]]] = True
        middle = np.where(flapping, low, middle)
    rate[key[first]] = middle


def _one_way(rate: Any, well: Any) -> Any:
    """Where a file has one measurement in both directions, it counts once; which ones are left out."""
    both = np.isfinite(rate) & np.isfinite(rate.T)
    if not both.any() or np.mean(rate[both] == rate.T[both]) <= 0.9:
        return np.zeros_like(both)
    lower = np.tril(np.ones_like(both)) & both & (rate == rate.T)
    rate[lower] = np.nan
    well[lower] = False
    return lower


def _layout(gpus: list[str]) -> tuple[list[str], list[str], Any, Any, list[str], Any]:
    """Names by node and rail, and where each GPU of the evidence has gone."""
    parted = [name.rpartition(":") if ":" in name else (name, "", "") for name in gpus]
    labels: dict[str, list[str]] = {}
    for host, _, label in parted:
        labels.setdefault(host, []).append(label)
    hosts = sorted(labels, key=natural)
    spread: dict[str, int] = {}
    for own in labels.values():
        for label in own:
            spread[label] = spread.get(label, 0) + 1
    shared = len(hosts) < 2 or sum(count > 1 for count in spread.values()) * 2 > len(spread)
    numbered = all(re.fullmatch(r"\D*\d+", label) for label in spread)
    rails = (
        (sorted(spread, key=natural) if numbered else list(spread))
        if shared
        else [str(i) for i in range(max(map(len, labels.values()), default=0))]
    )
    rank: dict[tuple[str, str], int] = {}
    for host in hosts:
        own = sorted(labels[host], key=natural) if numbered else labels[host]
        for at, label in enumerate(own):
            rank[host, label] = rails.index(label) if shared else at
    number = {host: i for i, host in enumerate(hosts)}
    keys = [(number[host], rank[host, label]) for host, _, label in parted]
    order = sorted(range(len(gpus)), key=lambda i: keys[i])
    place = np.empty(len(gpus), dtype=np.int64)
    place[order] = np.arange(len(gpus))
    node = np.array([keys[i][0] for i in order], dtype=np.int64)
    rail = np.array([keys[i][1] for i in order], dtype=np.int64)
    return [gpus[i] for i in order], hosts, node, rail, rails, place


def natural(text: str) -> list[tuple[int, int, str]]:
    """The key that sorts node2 before node10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", text) if part]
