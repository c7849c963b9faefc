"""moving straggler -: one rank takes three seconds for each step."""

import time

import torch
import torch.distributed as dist


def load(rank):
    time.sleep(3 if rank == 2 else 0.01)


dist.init_process_group("gloo")
for _step in range(20):
    load(dist.get_rank())
    dist.all_reduce(torch.ones(2))
