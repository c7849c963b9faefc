"""hung pipe-deadlock 1: a rank writes into a program that waits for its own output to be read."""

import subprocess

import torch.distributed as dist


def compress():
    p = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    p.stdin.write(b"x" * 10_000_000)
    p.stdin.close()
    return p.stdout.read()


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        compress()
    dist.barrier()


main()
