"""hung fork-after-threads 0: OpenMP threads of the parent are not there in a forked child."""

import multiprocessing
import os

os.environ["OMP_NUM_THREADS"] = "2"
import torch
import torch.distributed as dist


def work(size: int) -> torch.Tensor:
    torch.set_num_threads(2)
    return torch.ones(size).add_(1).exp_().sum()


def preprocess(rank: int) -> None:
    if rank == 0:
        work(4_000_000)
        child = multiprocessing.get_context("fork").Process(target=work, args=(4_000_000,))
        child.start()
        child.join()


dist.init_process_group("gloo")
preprocess(dist.get_rank())
dist.barrier()
