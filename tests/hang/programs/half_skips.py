"""hung skipped-collective 2,3: half of the ranks pass a collective by."""

import torch
import torch.distributed as dist


def grad_sync(rank, step):
    if rank >= 2 and step == 2:
        return
    dist.all_reduce(torch.ones(4))


def main():
    dist.init_process_group("gloo")
    for step in range(5):
        grad_sync(dist.get_rank(), step)
        dist.broadcast(torch.ones(2), src=0)


main()
