"""Memory grows with every step until there is none left: which line keeps it?

    python examples/memory_grows.py

It prints:

    [...]
    memory of rank 0/1 on node7, cpu: LEAK, 8.0KiB more after each step
      seen in 39 steps up to step 40; what grows was made here:
        +8.0KiB a step  examples/memory_grows.py:36  (script)  (now 312.2KiB in 78)
      kept by `errors` in train(), a list of 18 with their autograd graph
    hint: a tensor keeps the graph that made it: store loss.item() or loss.detach()
    [...]
    exit status 1
"""

import os
import subprocess
import sys


def train():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    errors = []
    for _ in range(40):
        batch = torch.randn(32, 64)
        predicted = model(batch)
        loss = (predicted - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append((predicted - batch).abs().mean())  # break it: each keeps the graph that made it


if __name__ == "__main__":
    if "EXAMPLE_TRAINS" in os.environ:
        train()
    else:  # the command needs no edit of the script: mldebug memory -- train.py
        command = [sys.executable, "-m", "mldebug", "memory", "--", __file__]
        environment = {**os.environ, "EXAMPLE_TRAINS": "1"}
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="")
        print("exit status", done.returncode)
