"""A training that keeps tensors as its argument says: for good (a leak), or up to a bound."""

from __future__ import annotations

import collections
import sys
from typing import Any

import torch
from torch import nn

kind, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
other = torch.optim.SGD(model.parameters(), 1e-3)
kept: Any = collections.deque(maxlen=100) if kind in ("deque", "both") else {} if kind == "every ten" else []
more: list[torch.Tensor] = []


class Cycle:
    def __init__(self, x: torch.Tensor) -> None:
        self.itself, self.x = self, x


def keep(step: int, x: torch.Tensor) -> None:
    if kind == "cycles":
        Cycle(x * 2)
    elif kind == "every ten":
        if step % 10 == 0:
            kept[step] = x
    elif kind == "closures":
        kept.append(lambda x=x: x.sum())
    elif step >= (60 if kind == "late" else 0):
        kept.append(x)
    if kind == "bounded list" and len(kept) > 30:
        kept.pop(0)
    if kind == "emptied" and step % 70 == 69:
        kept.clear()


for step in range(steps):
    if kind == "filled" and step >= 50:
        x = kept[step % 50]
    else:
        x = torch.randn(512, 64)
        keep(step, x)
    if kind == "both":
        more.append(torch.ones(64, 64))
    model(x).square().mean().backward()
    (other if kind == "second optimizer" and step >= 5 else optimizer).step()
    optimizer.zero_grad()
