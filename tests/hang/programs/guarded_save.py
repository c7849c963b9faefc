"""hung rank-guarded-collective 0: a save under `if rank == 0` has a barrier in it; "agent" lets spy see by signal."""

import sys

import torch
import torch.distributed as dist

import mldebug.hang


def save():
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    for step in range(5):
        dist.all_reduce(torch.ones(4))
        if step == 2 and dist.get_rank() == 0:
            save()


if "agent" in sys.argv:
    mldebug.hang.enable()
main()
