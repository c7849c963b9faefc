"""The same weights give other logits since the model is compiled: where do the two part?

    python examples/compiled_differs.py

It prints:

    a and b part at 1.norm (Norm), forward 0, output: inputs agree, outputs do not
        (error 0.012, 1e-05 is allowed in float32, 0 before)

    1.norm itself computes something else: its inputs agree within 0.
    hint: record with ops=True to see the operation

         error  rms of a  rms of b  dtypes     what
             0      0.71      0.71  fp32       0
    >    0.012      0.99         1  fp32       1.norm
         0.012      0.59      0.59  fp32       1.up
         0.011      0.25      0.26  fp32       1.down
        0.0039      0.69      0.69  fp32       1
         0.011      0.99         1  fp32       2.norm
         0.013      0.55      0.55  fp32       2.up

    13 tensors compared, 2 equal in every bit; error 0.0085 at the end of the model
"""

import torch
from torch import nn

import mldebug


class Norm(nn.Module):
    """Somebody gave it a way of its own for compiled code, and forgot eps there."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        eps = 0.0 if torch.compiler.is_compiling() else 1e-2
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = Norm(size)
        self.up = nn.Linear(size, 4 * size)
        self.down = nn.Linear(4 * size, size)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 4))
inputs = torch.randn(2, 8)
compiled = torch.compile(model, backend="aot_eager")  # any backend; this one needs no compiler of C++
report = mldebug.compare(model, compiled, inputs=inputs)
print(report.text())
