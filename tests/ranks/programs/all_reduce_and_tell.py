"""Sums a number over all ranks and says where this one is; a rank that the arguments name fails first."""

import os
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] in sys.argv[1:]:
    raise SystemExit(9)
number = torch.tensor(float(dist.get_rank()))
dist.all_reduce(number)
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
words = ["here", socket.gethostname(), *(f"{name}={os.environ[name]}" for name in names), f"sum={number:g}"]
sys.stdout.write(" ".join(words) + "\n")  # in one piece: print writes the line break by itself under `python -u`
dist.destroy_process_group()
