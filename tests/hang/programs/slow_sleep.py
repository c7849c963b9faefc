"""moving straggler -: rank 0 takes its time over one thing."""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep(20)
dist.barrier()
