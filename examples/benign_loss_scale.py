"""fp16 with a GradScaler: inf in a gradient, and a step that was skipped. Is that a trouble?

    python examples/benign_loss_scale.py

It prints:

    no trouble: the loss scale alone made it
    benign: inf in the gradient, outside any module, step 0, backward
    loss scale 65536, training went on
"""

import torch
from torch import nn

from mldebug import DebugUnderflowOverflow

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # break it: too high, as a scaler's first guess often is

with DebugUnderflowOverflow(model) as recorder:  # raises for a real overflow, and not for this
    recorder.quiet()
    for _step in range(8):
        inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skipped where a gradient is inf
        scaler.update()  # and the scale is halved
        optimizer.zero_grad()

report = recorder.report
print("trouble" if not report.ok else "no trouble: the loss scale alone made it")
print(report.text().partition("\n\n")[0])
print(f"loss scale {scaler.get_scale():.0f}, training went on")
