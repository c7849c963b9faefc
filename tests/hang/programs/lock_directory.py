"""hung lock-barrier-cycle 0: a directory is the lock, and its holder waits in a barrier."""

import contextlib
import os
import time

import torch.distributed as dist


@contextlib.contextmanager
def dir_lock(path):
    while True:
        try:
            os.mkdir(path)
            break
        except FileExistsError:
            time.sleep(0.1)
    try:
        yield
    finally:
        os.rmdir(path)


def build(rank, path):
    if rank:
        time.sleep(1)
    with dir_lock(path):
        dist.barrier()


dist.init_process_group("gloo")
build(dist.get_rank(), "/dev/shm/mldebug-lock-" + os.environ["TORCHELASTIC_RUN_ID"])
