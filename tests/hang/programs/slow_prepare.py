"""moving straggler -: rank 0 prepares the data while the others wait at a barrier."""

import time

import torch.distributed as dist


def prepare() -> None:
    for _part in range(40):
        time.sleep(0.5)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    prepare()
dist.barrier()
