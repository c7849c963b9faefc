"""hung cross-group-order 2: one rank goes through its groups in another order."""

import torch
import torch.distributed as dist


def sync_all(groups: list[object]) -> None:
    for group in groups:
        dist.all_reduce(torch.ones(4), group=group)


def main() -> None:
    dist.init_process_group("gloo")
    tp = dist.new_group([0, 1, 2, 3])
    dp = dist.new_group([0, 1, 2, 3])
    order = [tp, dp]
    if dist.get_rank() == 2:
        order = order[::-1]
    sync_all(order)


main()
