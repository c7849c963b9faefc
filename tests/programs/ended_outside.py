"""A run that something else ends: `sigterm` while it trains, or `collective` of two ranks, one of them bad."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
alone = sys.argv[1] == "sigterm"
if not alone:
    torch.distributed.init_process_group("gloo")
bad = alone or torch.distributed.get_rank() == 1
for step in range(5):
    x = torch.randn(4, 8)
    if bad and step == 3:
        x[0] = float("nan")
    optimizer.zero_grad()
    loss = model(x).mean()
    if alone and step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    loss.backward()
    optimizer.step()
    if not alone:
        torch.distributed.all_reduce(torch.ones(1))
