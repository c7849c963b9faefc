"""hung gil-held 2: an extension keeps the GIL while it sleeps."""

import ctypes

import torch
import torch.distributed as dist


def native_call():
    ctypes.PyDLL(None).sleep(10000)


def main():
    dist.init_process_group("gloo")
    for step in range(10):
        if dist.get_rank() == 2 and step == 4:
            native_call()
        dist.all_reduce(torch.ones(4))


main()
