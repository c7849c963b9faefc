"""hung collective-in-destructor 2: an object's destructor calls barrier, and on one rank it dies earlier."""

import torch
import torch.distributed as dist


class Buffer:
    def __del__(self) -> None:
        dist.barrier()


def train(rank: int) -> None:
    buffer = Buffer()
    kept = [buffer]
    for step in range(6):
        if rank == 2 and step == 3:
            kept.clear()
            del buffer
        dist.all_reduce(torch.ones(4))


dist.init_process_group("gloo")
train(dist.get_rank())
