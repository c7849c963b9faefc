"""A loop without any trouble; its model and its arguments are printed as a plain run prints them."""

import sys

import torch
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(5):
        opt.zero_grad()
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
        opt.step()
    print("arguments:", sys.argv[1:])
    print("name:", __name__, "loss:", loss.item())
