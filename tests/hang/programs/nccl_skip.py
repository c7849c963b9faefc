"""Rank 2 (of two ranks: 1) leaves out one all_reduce of ten, on GPUs. The argument says how the ranks see the result.

item: each step reads the sum (`.item()`), so the program stands there. ahead: nothing is read, so the CPU runs ahead
of the GPU. mixed: a broadcast follows each all_reduce. ddp: the collective is DDP's own, in backward. guarded: rank 0
alone enters a barrier.
"""

import sys

import torch
import torch.distributed as dist


def reduce_loss(loss: torch.Tensor, how: str) -> float:
    dist.all_reduce(loss)
    return loss.item() if how == "item" else 0.0


def train(how: str, rank: int, odd: int, device: torch.device) -> None:
    for step in range(10):
        loss = torch.full((1 << 20,), float(step), device=device).mean()
        if not (rank == odd and step == 3):
            reduce_loss(loss, how)
        if how == "mixed":
            rate = torch.ones(1, device=device)
            dist.broadcast(rate, src=0)
            rate.item()


def train_ddp(rank: int, odd: int, device: torch.device) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).to(device), device_ids=[device])
    for step in range(10):
        loss = model(torch.ones(8, 256, device=device)).square().mean()
        if rank == odd and step == 3:
            continue
        loss.backward()
        model.zero_grad()
        print(rank, step, loss.item(), flush=True)


def save(rank: int) -> None:
    if rank == 0:
        dist.barrier()


how = sys.argv[1] if len(sys.argv) > 1 else "item"
dist.init_process_group("nccl")
rank = dist.get_rank()
odd = min(2, dist.get_world_size() - 1)
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.all_reduce(torch.ones(4, device=device))
torch.cuda.synchronize()
if how == "ddp":
    train_ddp(rank, odd, device)
elif how == "guarded":
    save(rank)
    for _ in range(5):
        reduce_loss(torch.ones((), device=device), "item")
else:
    train(how, rank, odd, device)
dist.barrier()
torch.cuda.synchronize()
dist.destroy_process_group()
