"""hung extra-collective 1: rank 1 logs a value with a collective that the others do not call."""

import torch
import torch.distributed as dist


def log_spike(loss: torch.Tensor) -> None:
    dist.all_reduce(loss)


def train(rank: int) -> None:
    for step in range(6):
        loss = torch.tensor([9.0 if rank == 1 and step == 3 else 1.0])
        if loss.item() > 5:
            log_spike(loss)
        dist.broadcast(torch.ones(2), src=0)


dist.init_process_group("gloo")
train(dist.get_rank())
