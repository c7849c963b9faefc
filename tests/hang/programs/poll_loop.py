"""hung poll-loop 3: a rank waits for a file that nobody writes."""

import os
import time

import torch
import torch.distributed as dist


def wait_for(path: str) -> None:
    tries = 0
    while not os.path.exists(path):
        time.sleep(0.05)
        tries += 1


dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 3:
    wait_for("/nonexistent/done.flag")
dist.barrier()
