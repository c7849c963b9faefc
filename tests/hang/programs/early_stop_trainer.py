"""hung rank-local-decision 2: a trainer returns when its own loss gets no better."""

import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, rank: int) -> None:
        self.rank, self.best, self.stale = rank, 10.0, 0

    def improved(self, epoch: int) -> bool:
        loss = 1.0 / (epoch + 1) if self.rank != 2 else 1.0
        self.stale = 0 if loss < self.best else self.stale + 1
        self.best = min(self.best, loss)
        return self.stale == 0

    def fit(self) -> None:
        for epoch in range(20):
            dist.all_reduce(torch.ones(8))
            if not self.improved(epoch) and self.stale >= 3:
                return


dist.init_process_group("gloo")
Trainer(dist.get_rank()).fit()
dist.barrier()
