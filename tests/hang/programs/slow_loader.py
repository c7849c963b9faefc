"""moving straggler -: the loader of one rank is slow."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(3 if self.rank == 1 else 0.01)
        return torch.ones(4)


dist.init_process_group("gloo")
for batch in DataLoader(Slow(dist.get_rank()), batch_size=4, num_workers=1):
    dist.all_reduce(batch[0])
