"""The recorder in a Lightning Trainer: a callback.

    pip install lightning
    python examples/lightning_loop.py

It prints:

    [...]
    inf in the input input[0] of net (Sequential), step 3, forward: aten.addmm
    [...]
    Detected inf/nan during batch_number=3
    [...]
                      net.0 Linear
    [...]
         inf      inf input[0]
         nan      nan output
    [...]
         3        nan  2.186e+00        inf  net input[0]
    [...]
    stopped at step 3
"""

import logging
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from mldebug import NumericsError, OverflowCallback

warnings.simplefilter("ignore")  # Lightning has advice on workers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, number):
        scale = 1e38 if number == 3 else 1.0  # break it: one batch of data in other units
        return self.net(batch * scale).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[OverflowCallback()], default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(Regression(), DataLoader(torch.randn(32, 4) * 100, batch_size=4))
    except NumericsError as stopped:  # the report has been printed
        print("stopped at step", stopped.report.event.step)
