"""Rank 2 skips one all_reduce and waits in the broadcast behind it."""

import torch
import torch.distributed as dist


def reduce_loss(step: int, rank: int) -> None:
    loss = torch.full((4,), float(step))
    if rank == 2 and step == 3:
        return
    dist.all_reduce(loss)


def share_rate() -> None:
    rate = torch.ones(1)
    dist.broadcast(rate, src=0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(5):
        reduce_loss(step, rank)
        share_rate()
    dist.destroy_process_group()


main()
