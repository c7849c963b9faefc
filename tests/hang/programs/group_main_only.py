"""hung missing-group-constructor 0: the main process alone makes a group for its log."""

import torch
import torch.distributed as dist


def set_up_log(rank: int) -> object:
    return dist.new_group() if rank == 0 else None


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        set_up_log(rank)
    dist.all_reduce(torch.ones(4))


main()
