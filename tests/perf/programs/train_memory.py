"""A small training whose memory behaves as its argument says; prints the exact loss of each step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import torch
from torch import nn

kind, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 1)
        self.seen = torch.zeros(0, 64, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if kind == "cache":
            self.seen = torch.cat([self.seen, x.detach()])
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
numbers = []
for step in range(steps):
    batch = int(torch.randint(8, 200, ())) if kind == "variable" else 64
    if kind == "ctrl-c" and step == 12:
        os.kill(os.getpid(), signal.SIGINT)
    if kind == "killed" and step == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigterm" and step == 12:
        child = os.fork()
        if not child:
            signal.pause()
        os.kill(child, signal.SIGTERM)
        print("child:", os.waitpid(child, 0)[1], flush=True)
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        print("went on", flush=True)
    if kind == "oom" and step == 2:
        batch = 1 << (34 if device == "cuda" else 50)
    if kind == "lazy" and step % 5 == 4:
        extra = nn.Parameter(torch.zeros(64, 64, device=device))
        optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones_like(extra)
    for _ in range(4 if kind == "accumulation" else 1):
        x = torch.randn(batch, 64, device=device)
        loss = model(x).square().mean()
        loss.backward(retain_graph=kind == "losses")
    optimizer.step()
    optimizer.zero_grad()
    numbers.append(loss.item())
    if kind == "losses":
        losses.append(loss)
    if kind == "logged":
        losses.append(loss.detach())
    print(step, loss.item().hex())
