"""A plain training loop whose second feed-forward layer overflows in fp16 at step 2."""

import sys

import torch
from torch import nn


class FeedForward(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.wi = nn.Linear(16, 64, bias=False)
        self.wo = nn.Linear(64, 16, bias=False)
        nn.init.constant_(self.wi.weight, 1.0)
        nn.init.constant_(self.wo.weight, gain)

    def forward(self, x):
        return self.wo(torch.relu(self.wi(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(1 / 1024), FeedForward(3.0)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


if __name__ == "__main__":
    print("arguments:", sys.argv[1:])
    model = Net().half()
    opt = torch.optim.SGD(model.parameters(), 0.0)
    for step in range(4):
        opt.zero_grad()
        loss = model(torch.full((2, 16), 4.0 * 4**step, dtype=torch.float16)).float().mean()
        loss.backward()
        opt.step()
        print(f"step {step} done", flush=True)
