"""The GPU is idle nearly half of the time: is it the loader, and what would be enough?

    python examples/slow_loader.py

It prints:

    use DataLoader(..., num_workers=2, prefetch_factor=2)
    [...]
    a step of 50 ms is fed from 2 workers on; with these settings it waits 2.7% of a
      step
    [...]
"""

import time

import torch
from torch.utils.data import Dataset

import mldebug


class Remote(Dataset):
    """Each sample takes 4 ms, most of it waiting for storage."""

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.004)  # break it
        return torch.full((16,), float(index))


if __name__ == "__main__":  # workers may be spawned
    report = mldebug.dataloader_bench(
        Remote(), batch_size=8, step_seconds=0.05, num_workers=[0, 2], prefetch_factors=[2], seconds=5
    )
    print(report.text())
