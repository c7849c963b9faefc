"""hung cross-group-order 1: a rank that is in two groups uses them in another order."""

import torch
import torch.distributed as dist


def tp_step(x, g):
    dist.all_reduce(x, group=g)


def dp_step(x, g):
    dist.all_reduce(x, group=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    a = dist.new_group([0, 1, 2])
    b = dist.new_group([1, 2, 3])
    x = torch.ones(4)
    for step in range(4):
        if rank == 1 and step == 2:
            dp_step(x, b)
            tp_step(x, a)
        else:
            if rank < 3:
                tp_step(x, a)
            if rank > 0:
                dp_step(x, b)


main()
