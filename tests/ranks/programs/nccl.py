"""Two ranks with NCCL, whose timeouts are short: one goes first for long, then one is held for long."""

import datetime
import sys
import time

import torch
import torch.distributed as dist

from mldebug.ranks import breakpoint_on, local_rank, main_process_first

short = datetime.timedelta(seconds=10)
two = torch.cuda.device_count() > 1
torch.cuda.set_device(local_rank() if two else 0)
dist.init_process_group("nccl" if two else "gloo", timeout=short)
# On one GPU NCCL takes no two ranks in one group: each has a group of its own, with its own watchdog.
groups = [dist.new_group([one], backend="nccl", timeout=short) for one in range(2)]
mine = None if two else groups[dist.get_rank()]
total = torch.ones(4, device="cuda")
dist.all_reduce(total, group=mine)
with main_process_first():
    time.sleep(float(sys.argv[1]) if dist.get_rank() == 0 else 0)
dist.all_reduce(total, group=mine)
breakpoint_on(1)
dist.all_reduce(total, group=mine)
torch.cuda.synchronize()
sys.stdout.write(f"rank {dist.get_rank()} total {total[0].item()}\n")
sys.stdout.flush()
dist.destroy_process_group()
