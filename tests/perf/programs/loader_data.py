"""Datasets that are slow, break, hang and die in known ways; the tests import them and name them to the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

BAD = 17


class Waits(Dataset):
    """As from slow storage: 4 ms for a sample, during which nothing computes."""

    seconds = 0.004

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((100,), float(index))


class Free(Waits):
    seconds = 0.0

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Raises(Free):
    def __getitem__(self, index):
        if index == BAD:
            raise ValueError("bad jpeg")
        return torch.ones(3)


class RaisesByName(Free):
    def __getitem__(self, index):
        if index == BAD:
            raise FileNotFoundError(2, "No such file or directory", "img/17.jpg")  # an error of several arguments
        return torch.ones(3)


class RaisesInBatch(Free):
    def __getitems__(self, indices):
        if BAD in indices:
            raise OSError("disk is gone")
        return [torch.ones(3)] * len(indices)


class Dies(Free):
    signal = signal.SIGKILL

    def __getitem__(self, index):
        if index == BAD:
            os.kill(os.getpid(), self.signal)
        return torch.ones(3)


class Exits(Free):
    def __getitem__(self, index):
        if index == BAD:
            os._exit(3)
        return torch.ones(3)


class Hangs(Free):
    """It hangs where no Python code can be interrupted, and has a child of its own that would outlive it."""

    def __getitem__(self, index):
        if index == BAD:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.run([sys.executable, "-c", "import time; time.sleep(300)", "left-by-hangs"], check=False)
        return torch.ones(3)


class Ragged(Free):
    def __getitem__(self, index):
        return torch.ones(4 if index == BAD else 3)


class Empty(Free):
    def __len__(self):
        return 0


class Big(Free):
    def __getitem__(self, index):
        return torch.ones(1 << 20)


class Stream(IterableDataset):
    """Sixty samples, split among the workers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for number in range(first, 60, step):
            time.sleep(0.001)
            yield torch.tensor([float(number), 1.0])


class Unsplit(IterableDataset):
    def __iter__(self):
        for number in range(60):
            time.sleep(0.001)
            yield torch.tensor([float(number)])


class BrokenStream(IterableDataset):
    def __iter__(self):
        yield from (torch.ones(2) for _ in range(BAD))
        raise KeyError("shard-0003.tar")


def make_loader():
    return DataLoader(Waits(), batch_size=8, shuffle=True, num_workers=1)


def make_nothing():
    return 7
