"""hung rank-local-decision 1: early stopping is decided by each rank for itself."""

import torch
import torch.distributed as dist


class Stopper:
    def __init__(self) -> None:
        self.best = 1e9

    def should_stop(self, loss: float) -> bool:
        worse = loss > self.best
        self.best = min(self.best, loss)
        return worse


def fit(rank: int) -> None:
    stopper = Stopper()
    for epoch in range(8):
        loss = 1.0 / (epoch + 1) if rank != 1 or epoch < 3 else 5.0
        dist.all_reduce(torch.tensor([loss]))
        if stopper.should_stop(loss):
            break


dist.init_process_group("gloo")
fit(dist.get_rank())
dist.barrier()
