"""The loss is finite, and the weights are NaN after the first step: it began in backward.

    python examples/nan_in_backward.py

It prints:

    nan in the gradient of act (SafeSqrt), step 0, backward: SqrtBackward0

    Forward was finite; the gradient of aten.sqrt (SqrtBackward0) in act (SafeSqrt)
    is nan. The gradient of sqrt(x) is 1 / (2 sqrt(x)): at x = 0 it is inf, and NaN
    where the gradient that comes in is 0, as it does behind torch.where or a mask.
    hint: take the root of a safe x: torch.sqrt(torch.where(ok, x, 1.0)), or of x +
          eps or x.clamp(min=eps)

    operation: SqrtBackward0, of aten.sqrt
      at examples/nan_in_backward.py:38, in SafeSqrt.forward
        return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))
      the gradient was computed by aten.div.Tensor:
        self  3x8 float32  -0.01263 .. 0.02566
        other  3x8 float32  0 .. 2.187
        result  3x8 float32  -0.02002 .. 0.04303, 19 of 24 nan or inf

      step       loss  grad norm    abs max  in
         0          -          -  1.196e+00  embed output
           nan in act SqrtBackward0 gradient
"""

import torch
from torch import nn

import mldebug


class SafeSqrt(nn.Module):
    """Looks safe: where x is 0 the root is not used. Its gradient is: 0 * inf."""

    def forward(self, x):
        return torch.where(x > 0, torch.sqrt(x), torch.zeros_like(x))


torch.manual_seed(0)
model = nn.Sequential()
model.embed = nn.Linear(4, 8)
model.relu = nn.ReLU()
model.act = SafeSqrt()
model.head = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)


def step(i):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


report = mldebug.diagnose(model, step, steps=5)  # looks at every operation, so it names the line
print(report.text())
