"""hung skipped-collective 1: a rank passes a bad batch by, and stands at another collective of the next one."""

import torch
import torch.distributed as dist


def train(rank: int) -> None:
    for step in range(6):
        bad = bool(rank == 1 and step == 2)
        dist.all_reduce(torch.ones(2))
        if bad:
            continue
        dist.broadcast(torch.ones(3), src=0)


dist.init_process_group("gloo")
train(dist.get_rank())
