"""The recorder in a loop with Accelerate: nothing changes but one line, before or after `prepare`.

    pip install accelerate
    python examples/accelerate_loop.py
    accelerate launch --num_processes 8 examples/accelerate_loop.py

It prints:

    nan in the parameter weight of 1 (LayerNorm), step 2, optimizer
    step 2 of the optimizer, batch 6
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mldebug import DebugUnderflowOverflow, NumericsError

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
recorder = DebugUnderflowOverflow(model)
recorder.quiet()

try:
    for number, (inputs, targets) in enumerate(data):
        if number == 6:
            with torch.no_grad():
                accelerator.unwrap_model(model)[1].weight[3] = float("nan")  # break it: a damaged checkpoint
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
except NumericsError as stopped:
    print(stopped.report.text().partition("\n\n")[0])
    print("step", stopped.report.event.step, "of the optimizer, batch", stopped.report.event.batch)
