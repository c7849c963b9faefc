"""hung pipe-deadlock 1: a rank waits for a program whose output fills a pipe that it does not read."""

import subprocess
import sys

import torch
import torch.distributed as dist


def export() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print('x' * 1000000)"], stdout=subprocess.PIPE)
    child.wait()


dist.init_process_group("gloo")
for step in range(4):
    if dist.get_rank() == 1 and step == 2:
        export()
    dist.all_reduce(torch.ones(4))
