"""hung lock-barrier-cycle 0: torch's lock file for builds, whose owner waits in a barrier."""

import os
import tempfile
import time

import torch.distributed as dist
from torch.utils.file_baton import FileBaton


def build(rank: int) -> None:
    baton = FileBaton(os.path.join(tempfile.gettempdir(), f"mldebug-baton-{os.environ['MASTER_PORT']}"))
    time.sleep(1 if rank else 0)
    if baton.try_acquire():
        dist.barrier()
        baton.release()
    else:
        baton.wait()
        dist.barrier()


dist.init_process_group("gloo")
build(dist.get_rank())
