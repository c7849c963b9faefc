"""The recorder in a loop of your own: any model, any optimizer, gradient accumulation and a loss of your own.

    python examples/plain_loop.py

It prints:

    inf in the loss, outside any module, step 4, forward: aten.log
    steps dropped: [4]
    weights are finite: True
"""

import torch
from torch import nn

import mldebug
from mldebug import DebugUnderflowOverflow

torch.manual_seed(0)
model = nn.Sequential()
model.embed = nn.Linear(4, 16)
model.act = nn.GELU()
model.head = nn.Linear(16, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def criterion(logits, labels):
    probability = torch.softmax(logits, -1)
    return -torch.log(probability[torch.arange(len(labels)), labels]).mean()  # log(0) is -inf


with DebugUnderflowOverflow(model, on_event="skip") as recorder:  # drop such steps, count them, and go on
    recorder.quiet()
    for step in range(6):
        for _micro_batch in range(2):
            inputs, labels = torch.randn(8, 4), torch.randint(0, 3, (8,))
            if step == 4:
                inputs = inputs * 1e5  # break it: a batch that nobody normalised
            loss = mldebug.check(criterion(model(inputs), labels) / 2, "loss")  # made outside of any module
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

report = recorder.report
print(report.text().partition("\n\n")[0])  # the event; all of it has the frames before it, too
print("steps dropped:", report.dropped_steps)
print("weights are finite:", all(weight.isfinite().all().item() for weight in model.parameters()))
