"""hung rank-local-decision 1: early stopping by a rank's own loss, out of two loops."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 1))
    best = float("inf")
    patience = 0
    for epoch in range(10):
        for _i in range(2):
            model(torch.ones(2, 8)).sum().backward()
        val_loss = 1.0 / (epoch + 1) if rank != 1 or epoch < 2 else 9.0
        if val_loss < best:
            best = val_loss
            patience = 0
        else:
            patience += 1
        if patience >= 2:
            break
    dist.barrier()


main()
