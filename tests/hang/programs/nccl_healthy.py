"""Healthy work on GPUs that looks still for a while. The argument says how.

long: steps of three seconds on the GPU, each read at its end. late: rank 1 prepares for three seconds on the CPU in
each step, while the others wait in all_reduce on their GPUs. alone: rank 0 computes for ten seconds, the others wait
in a barrier.
"""

import sys
import time

import torch
import torch.distributed as dist


def compute(seconds: float, device: torch.device) -> torch.Tensor:
    """Keep the GPU at work for about that long, and the CPU free meanwhile."""
    x = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    torch.cuda.synchronize()
    each = (time.perf_counter() - began) / 20
    for _ in range(int(seconds / each)):
        x = (x @ x).clamp(-1, 1)
    return x.mean()


def prepare(rank: int) -> None:
    if rank == 1:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            sum(range(1000))


how, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.all_reduce(torch.ones(4, device=device))
for step in range(steps):
    if how == "long":
        loss = compute(3.0, device)
    elif how == "late":
        prepare(rank)
        loss = torch.ones((), device=device)
    else:
        loss = compute(10.0 if rank == 0 else 0.1, device)
    dist.all_reduce(loss)
    print(rank, step, loss.item(), flush=True)
dist.destroy_process_group()
