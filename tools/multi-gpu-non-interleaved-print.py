#!/usr/bin/env python
"""Every rank prints a long message, and none is mixed with another's. With 2 GPUs, or none, run it as:

    torchrun --nproc_per_node 2 multi-gpu-non-interleaved-print.py

Use printflock in your own code in the same way: from mldebug import printflock as print
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.ranks import printflock

__all__ = ["printflock"]


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("run it so: torchrun --nproc_per_node 2 multi-gpu-non-interleaved-print.py")
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if gpus else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    printflock(f"This is a very long message from rank {rank} (world_size={world_size})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
