"""A T5 in fp16: the loss was fine yesterday, and is NaN today.

    python examples/nan_fp16_t5.py

It prints:

    inf in the output of encoder.block.1.layer.1.DenseReluDense.wo (Linear), step 3,
      forward: aten.mm
    [...]
    aten.mm in encoder.block.1.layer.1.DenseReluDense.wo (Linear) made 321 of 512
    elements inf; nothing before it was. A sum of products is beyond the range of
    float16 (65504); in bfloat16 or float32 it is an ordinary number.
    hint: run this module in bfloat16 or float32, or scale down what it takes
    [...]
    operation: aten.mm
    [...]
        hidden_states = self.wo(hidden_states)
        self  16x64 float16  -1.136e+04 .. 1.434e+04
        mat2  64x32 float16  -24.08 .. 25.92
        result  16x32 float16  -6.534e+04 .. 6.528e+04, 321 of 512 nan or inf
    [...]
    Detected inf/nan during batch_number=3
    [...]
                      encoder.block.0.layer.1.DenseReluDense.wo Linear
    [...]
    0.00e+00 1.43e+04 input[0]
    [...]
                      encoder.block.1.layer.1.DenseReluDense.wo Linear
    4.67e-03 2.59e+01 weight
    0.00e+00 1.43e+04 input[0]
    9.34e+01      inf output
    [...]
      step       loss  grad norm    abs max  in
    [...]
         3  5.258e+00          -        inf  ...1.layer.1.DenseReluDense.wo output
"""

import torch
from transformers import T5Config, T5ForConditionalGeneration

from mldebug import DebugUnderflowOverflow, NumericsError

torch.manual_seed(0)
torch.set_num_threads(1)
config = T5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
    dropout_rate=0.0, decoder_start_token_id=0,
)  # fmt: skip
model = T5ForConditionalGeneration(config).half()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
recorder = DebugUnderflowOverflow(model)  # the one line that finds it
recorder.quiet()  # the report is printed below, and not as it happens

try:
    for step in range(6):
        if step == 3:  # break it: what some ten thousand steps of bf16 pretraining do to these weights
            with torch.no_grad():
                for weight in model.encoder.block[1].layer[1].DenseReluDense.parameters():
                    weight.mul_(60)
        ids = torch.randint(3, 64, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
except NumericsError as stopped:
    print(stopped.report.text())
