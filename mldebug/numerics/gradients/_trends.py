"""Gradient norms that explode or vanish: over the steps that are remembered, and from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mldebug.numerics.gradients._gradients import GradientNorms

_WINDOW = 64  # steps that a trend is taken over
_FEWEST = 12
_MANY = 4000  # parameters from which fewer steps are looked at: all pairs of steps are compared
_GROWTH = 100.0  # by which a norm grows over the window; a warm-up makes it some ten times as large
_LOSS = 1e-3  # share of the whole norm that is left of what a layer had
_STEADY = 0.85  # of all pairs of steps, how many more go up than down (Kendall's tau)
_DEPTH, _LAYERS = 1e-6, 6  # ratio of the norms of the lowest layers to the highest, at least so many layers


def trends(taken: Sequence[GradientNorms]) -> list[dict[str, Any]]:
    """What is to be said of the gradient norms by module: "trend" (exploding, vanishing, vanishing with depth ...),
    "module", "from" and "to" (norms), "steps" (first, last).

    A trend over steps is Theil and Sen's slope (the median of all pairs' slopes) of the logarithm of a norm, with
    Kendall's tau for how steady it is; so neither a spike nor a bad step makes one.
    """
    table = _by_module(taken)
    if table is None:
        return []
    names, steps, norms = table
    total = torch.linalg.vector_norm(norms, dim=1)
    said = []
    slope, tau = _slopes(torch.log(torch.cat([total[:, None], norms], dim=1).clamp(min=1e-300)))
    length = len(steps) - 1
    rising = (slope * length >= math.log(_GROWTH)) & (tau >= _STEADY)
    if bool(rising[0]):
        worst = int((norms[-1] * rising[1:]).argmax())
        said.append(_row("exploding", names[worst], norms[:, worst], steps))
    share = norms / total[:, None].clamp(min=1e-300)
    slope, tau = _slopes(torch.log(share.clamp(min=1e-300)))
    falling = (slope * length <= math.log(_LOSS)) & (tau <= -_STEADY)
    for i in torch.nonzero(falling).flatten().tolist()[:3]:
        said.append(_row("vanishing", names[i], norms[:, i], steps))
    return [*said, *_depth(names, norms, steps)]


def words(trend: dict[str, Any]) -> str:
    """A trend in a line."""
    first, last = trend["steps"]
    change = f"from {trend['from']:.3g} to {trend['to']:.3g}"
    if "other" in trend:
        return (
            f"gradients {trend['trend']}: norms go {change} between {trend['other']} and {trend['module']} "
            f"(median of steps {first}-{last})"
        )
    return f"gradients are {trend['trend']}: the norm of {trend['module']} went {change} in steps {first}-{last}"


def _by_module(taken: Sequence[GradientNorms]) -> tuple[list[str], list[int], Tensor] | None:
    """(modules, steps, norms by step and module) of the last steps that are finite and of the same parameters."""
    if len(taken) < _FEWEST:
        return None
    owners = taken[-1].owners
    window = _WINDOW if len(owners) < _MANY else _WINDOW // 4
    same = [norms for norms in taken if len(norms.owners) == len(owners)][-window:]
    rows = torch.tensor([norms.values for norms in same], dtype=torch.float64)
    finite = torch.isfinite(rows).all(dim=1)
    steps = [norms.step for norms, good in zip(same, finite.tolist(), strict=True) if good]
    if len(steps) < _FEWEST:
        return None
    rows = rows[finite]
    names = list(dict.fromkeys(owner.name or owner.cls for owner, _, _ in owners))
    index = {name: i for i, name in enumerate(names)}
    place = torch.tensor([index[owner.name or owner.cls] for owner, _, _ in owners])
    squares = torch.zeros(len(steps), len(names), dtype=torch.float64)
    squares.index_add_(1, place, rows * rows)
    trained = (squares > 0).any(dim=0)
    kept = [name for name, keep in zip(names, trained.tolist(), strict=True) if keep]
    return (kept, steps, squares[:, trained].sqrt()) if kept else None


def _slopes(logs: Tensor) -> tuple[Tensor, Tensor]:
    """(Theil and Sen's slope by step, Kendall's tau) of each column."""
    count = logs.shape[0]
    first, second = torch.triu_indices(count, count, 1).unbind()
    differences = logs[second] - logs[first]
    slope = (differences / (second - first)[:, None]).median(dim=0).values
    return slope, differences.sign().mean(dim=0)


def _depth(names: list[str], norms: Tensor, steps: list[int]) -> list[dict[str, Any]]:
    """Norms that fall or rise steadily from the last layer to the first: a deep network without residuals or norms."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        parts = [part for part in name.split(".") if not part.isdigit()]
        if len(parts) < len(name.split(".")):  # one of several layers
            groups.setdefault(".".join(parts), []).append(i)
    medians = norms.median(dim=0).values
    for indices in groups.values():
        values = medians[indices]
        if len(indices) < _LAYERS or not bool((values > 0).all()):
            continue
        ratio = float(values[0] / values[-1])
        _, tau = _slopes(torch.log(values)[:, None])
        if (ratio < _DEPTH and tau > _STEADY) or (ratio > 1 / _DEPTH and tau < -_STEADY):
            row = _row("vanish with depth" if ratio < 1 else "explode with depth", names[indices[0]], values, steps)
            return [{**row, "from": float(values[-1]), "to": float(values[0]), "other": names[indices[-1]]}]
    return []


def _row(trend: str, module: str, values: Tensor, steps: list[int]) -> dict[str, Any]:
    quarter = max(len(values) // 8, 1)
    before, after = float(values[:quarter].median()), float(values[-quarter:].median())
    return {"trend": trend, "module": module, "from": before, "to": after, "steps": [steps[0], steps[-1]]}
