"""hung two-threads-one-group 2: a thread of one rank is faster than its main thread."""

import threading
import time

import torch
import torch.distributed as dist


def ckpt(delay):
    time.sleep(delay)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    t = threading.Thread(target=ckpt, args=(0.2 if rank == 2 else 1.2,), name="async-ckpt")
    t.start()
    time.sleep(0.7)
    dist.all_reduce(torch.ones(4))
    t.join()


main()
