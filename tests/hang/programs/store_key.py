"""hung poll-loop 3: a rank waits for a key that nobody sets."""

import datetime

import torch.distributed as dist


def wait_ready(store):
    store.wait(["ready"], datetime.timedelta(seconds=1800))


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1800))
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 3:
        wait_ready(store)
    dist.barrier()


main()
