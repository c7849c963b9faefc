"""moving unknown -: a short job of many quick steps; rank 0 writes a checkpoint while the others wait."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 8)).sum().backward()
    if step == 20 and dist.get_rank() == 0:
        for _part in range(int(sys.argv[2])):
            time.sleep(0.5)
    time.sleep(0.02)
dist.barrier()
del model  # before its process group, as tests/forked.py says
dist.destroy_process_group()
