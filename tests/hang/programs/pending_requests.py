"""hung p2p-cycle -: every rank waits for a message before it sends its own."""

import torch
import torch.distributed as dist


def run(rank: int, world: int) -> None:
    buffer = torch.zeros(4)
    request = dist.irecv(buffer, src=(rank + 1) % world)
    request.wait()
    dist.send(buffer, dst=(rank - 1) % world)


dist.init_process_group("gloo")
run(dist.get_rank(), 4)
