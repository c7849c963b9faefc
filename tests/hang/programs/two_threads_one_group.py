"""hung two-threads-one-group -: a thread averages weights while the main thread trains, on one group."""

import threading
import time

import torch
import torch.distributed as dist


def average(rank: int) -> None:
    time.sleep(0.5 if rank % 2 else 0.0)
    dist.broadcast(torch.ones(4), src=0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    thread = threading.Thread(target=average, args=(rank,), name="averager")
    thread.start()
    time.sleep(0.0 if rank % 2 else 0.5)
    dist.all_reduce(torch.ones(1000))
    thread.join()


main()
