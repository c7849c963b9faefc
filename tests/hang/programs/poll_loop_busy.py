"""hung poll-loop 0: a rank asks a request again and again that can never complete."""

import torch
import torch.distributed as dist


def drain(work: object) -> None:
    while not work.is_completed():
        pass


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    drain(dist.irecv(torch.ones(2), src=1))
dist.barrier()
