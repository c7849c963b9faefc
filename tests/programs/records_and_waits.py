"""Records some steps into the file named, says so, and waits to be killed."""

import sys
import time

import torch
from torch import nn

from mldebug import DebugUnderflowOverflow

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), 1e-2)
DebugUnderflowOverflow(model, output=sys.argv[1])
for _ in range(6):
    opt.zero_grad()
    model(torch.randn(2, 4)).mean().backward()
    opt.step()
print("ready", flush=True)
time.sleep(600)
