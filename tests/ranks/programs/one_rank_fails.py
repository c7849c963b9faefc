"""Four ranks that train; one of them fails in a way that the first argument names, and the others feel it."""

import os
import signal
import sys

import torch
import torch.distributed as dist

mode, culprit = sys.argv[1], int(sys.argv[2])


def check(rows: int) -> None:
    assert rows == 4, f"rank {dist.get_rank()}: {rows} rows"


def train(rank: int) -> None:
    for step in range(3):
        print(f"step {step} loss {2.5 - step / 4}", flush=True)
        dist.all_reduce(torch.ones(1))
    if mode == "assert":
        check(5 + rank % 2)
    if rank == culprit:
        if mode == "chain":
            try:
                {}["lr"]
            except KeyError as exc:
                raise RuntimeError("no learning rate here") from exc
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
train(dist.get_rank())
