"""A data-parallel job that uses what there is for ranks: whole lines, one rank first, losses of every rank."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mldebug import main_process_first, print_once, rank0_print
from mldebug import printflock as print

STEPS = 12


def prepare(folder: Path) -> str:
    file = folder / "prepared.txt"
    if not file.exists():
        file.write_text(f"by rank {dist.get_rank()}")
    return file.read_text()


def count(found: list[int]) -> None:
    for i in range(50):
        found.append(i)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    rank = dist.get_rank()
    for step in range(STEPS):
        inputs = torch.full((4, 8), float(rank + step))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item().hex()}", "x" * 5000)
        sys.stdout.write(f"rank {rank} wrote step {step}\n")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with main_process_first():
        print(f"rank {dist.get_rank()} data", prepare(Path(sys.argv[1])))
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    found: list[int] = []
    thread = threading.Thread(target=count, args=(found,), name="counter")
    thread.start()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    thread.join()
    rank0_print("rank 0 says the sum is", sum(found))
    print_once(f"rank {dist.get_rank()} once")
    del model  # of DDP, which waits at its end for threads of a group that has gone, and they for the lock of Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
