"""Trains a step and ends with the status 3."""

import sys

import torch
from torch import nn

model = nn.Linear(4, 1)
model(torch.ones(2, 4)).mean().backward()
sys.exit(3)
