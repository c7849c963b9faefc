"""hung extra-collective 1: one call too many, which shows at the end only."""

import torch
import torch.distributed as dist


def train_step(x, rank, step):
    dist.all_reduce(x)
    if rank == 1 and step == 2:
        dist.all_reduce(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(5):
        train_step(torch.ones(4), rank, step)
    dist.barrier()


main()
