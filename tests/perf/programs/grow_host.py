"""Under memory_watch: loops that keep more with each step, as their names say. Prints a report for each as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from mldebug.perf import memory_watch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def net() -> Any:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(DEVICE)


def run(kind: str, steps: int) -> None:
    model = net()
    optimizer: Any = torch.optim.Adam(model.parameters(), 1e-3)
    history: dict[str, list[Any]] = {"arrays": []}
    kept: list[Any] = []
    x = torch.randn(64, 64, device=DEVICE)
    for _ in range(steps):
        if kind in ("graphs", "results"):
            with torch.set_grad_enabled(kind == "graphs"):
                kept.append(model(x))
            continue
        if kind == "rollout":
            with torch.no_grad():
                kept.append(model(x))
            if len(kept) % 50:
                continue
            kept.clear()
        if kind == "numpy":
            history["arrays"].append(np.ones(64 << 10))
        if kind == "models":
            model = net()
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            kept.append(model)
        if kind == "optimizers":
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            kept.append(optimizer)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


for word in sys.argv[1:]:
    kind, _, steps = word.partition("=")
    print(f"{kind} begins", file=sys.stderr, flush=True)
    with memory_watch() as watch:
        run(kind, int(steps))
    print(json.dumps({"kind": kind, "text": watch.report.text(), **watch.report.to_dict()}), flush=True)
