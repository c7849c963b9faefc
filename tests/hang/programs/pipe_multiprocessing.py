"""hung pipe-deadlock 2: a rank joins a child before it has read the queue that the child fills."""

import multiprocessing

import torch
import torch.distributed as dist


def produce(queue: "multiprocessing.Queue[bytes]") -> None:
    queue.put(b"x" * 1_000_000)


def prepare() -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=produce, args=(queue,))
    child.start()
    child.join()
    queue.get()


dist.init_process_group("gloo")
if dist.get_rank() == 2:
    prepare()
dist.all_reduce(torch.ones(4))
