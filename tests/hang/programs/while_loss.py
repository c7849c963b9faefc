"""hung rank-local-decision 2: each rank ends the loop by its own loss."""

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss = 1.0
    while loss > 0.1:
        loss = loss * (0.5 if rank != 2 else 0.2)
        dist.all_reduce(torch.tensor([loss]))
    dist.barrier()


main()
