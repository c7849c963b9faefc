"""Trains a step and fails by itself."""

import torch
from torch import nn

model = nn.Linear(4, 1)
model(torch.ones(2, 4)).mean().backward()
raise RuntimeError("the data set is gone")
