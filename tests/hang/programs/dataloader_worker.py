"""hung dataloader-worker 3: a loader worker reads from a pipe that nobody writes to."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pipe = os.pipe()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 3 and index == 9:
            os.read(self.pipe[0], 1)
        return torch.ones(4)


dist.init_process_group("gloo")
for batch in DataLoader(Remote(dist.get_rank()), batch_size=2, num_workers=1, multiprocessing_context="fork"):
    dist.all_reduce(batch)
