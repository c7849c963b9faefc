"""hung pipe-deadlock 1: a rank polls for the end of a program that writes into a full pipe."""

import subprocess
import sys
import time

import torch.distributed as dist


def tool():
    p = subprocess.Popen([sys.executable, "-c", "print('y'*3000000)"], stdout=subprocess.PIPE, text=True)
    while p.poll() is None:
        time.sleep(0.1)
    return p.stdout.read()


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        tool()
    dist.barrier()


main()
