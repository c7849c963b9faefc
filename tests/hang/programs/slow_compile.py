"""moving straggler -: one rank waits for a compiler."""

import subprocess
import sys

import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 2:
    subprocess.run([sys.executable, "-c", "while True: pass"], check=False)
dist.barrier()
