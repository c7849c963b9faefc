"""hung collective-in-destructor 2: an engine calls a barrier as it dies, and one rank keeps a reference to it."""

import torch
import torch.distributed as dist

KEPT = []


class Engine:
    def __del__(self) -> None:
        dist.barrier()


def warm_up(rank: int) -> None:
    engine = Engine()
    if rank == 2:
        KEPT.append(engine)


dist.init_process_group("gloo")
warm_up(dist.get_rank())
for _step in range(3):
    dist.all_reduce(torch.ones(4))
