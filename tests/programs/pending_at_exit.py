"""A bad forward is the last thing that this program does."""

import torch
from torch import nn

from mldebug import DebugUnderflowOverflow

torch.manual_seed(0)


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


model = nn.Sequential(nn.Linear(4, 4), Exp())
DebugUnderflowOverflow(model)
model(torch.full((2, 4), 1e5)).mean().backward()
print("the script ended", flush=True)
