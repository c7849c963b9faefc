"""hung missing-group-constructor 3: one rank does not take part in making a group that it is a member of."""

import torch
import torch.distributed as dist


def build(rank: int) -> object:
    if rank != 3:
        return dist.new_group([0, 1, 2, 3])
    return None


dist.init_process_group("gloo")
build(dist.get_rank())
dist.all_reduce(torch.ones(2))
