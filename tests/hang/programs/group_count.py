"""hung missing-group-constructor 2,3: only its members make a small group, so the next group has another number."""

import torch.distributed as dist


def build(rank: int) -> list[object]:
    groups = []
    if rank < 2:
        groups.append(dist.new_group([0, 1]))
    groups.append(dist.new_group([0, 1, 2, 3]))
    return groups


dist.init_process_group("gloo")
build(dist.get_rank())
dist.barrier()
