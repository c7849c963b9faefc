"""hung rank-guarded-collective 0: rank 0 evaluates alone, and the wrapped model sends its buffers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model: torch.nn.Module) -> None:
    model(torch.ones(4, 8))


def main() -> None:
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
    rank = dist.get_rank()
    for _epoch in range(3):
        model(torch.ones(4, 8)).sum().backward()
        if rank == 0:
            evaluate(model)
    dist.barrier()


main()
