"""hung p2p-cycle 0,1: two of four ranks wait for a message of each other."""

import torch
import torch.distributed as dist


def exchange(rank):
    buf = torch.zeros(4)
    if rank < 2:
        dist.recv(buf, src=1 - rank)
        dist.send(torch.ones(4), dst=1 - rank)


dist.init_process_group("gloo")
exchange(dist.get_rank())
dist.barrier()
