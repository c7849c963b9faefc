"""main_process_first: one rank downloads or unpacks, and the others then find the data there.

    from main_process_first import main_process_by_path_first
    with main_process_by_path_first("/data/cache"): ...

To see it: `torchrun --nproc-per-node 2 main_process_first.py`. More: docs/ranks.md.
"""

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.ranks import local_main_process_first, main_process_by_path_first
from mldebug.ranks import local_rank as get_local_rank
from mldebug.ranks import main_process_first as global_main_process_first
from mldebug.ranks import rank as get_global_rank
from mldebug.ranks._mounts import kind_of


def path_to_fs_type(path):
    return kind_of(path)[1].type


def is_local_fs(path):
    return kind_of(path)[0] == "local"


def is_local_main_process():
    return get_local_rank() == 0


def is_global_main_process():
    return get_global_rank() == 0


def is_main_process_by_path(path):
    return is_local_main_process() if is_local_fs(path) else is_global_main_process()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("run it so: torchrun --nproc-per-node 2 main_process_first.py")
    import torch.distributed as dist

    dist.init_process_group("gloo")
    local, rank, kind = get_local_rank(), get_global_rank(), "" if is_main_process_by_path("./") else "non-"
    for name, scope, who in (
        ("global_main_process_first", global_main_process_first(), f"global rank {rank}"),
        ("local_main_process_first", local_main_process_first(), f"local rank {local}"),
        ("is_main_process_by_path", main_process_by_path_first("./"), f"{kind}main rank local={local} global={rank}"),
    ):
        heading = f"\n\n*** Demo {name}\n" if rank == 0 else ""
        with scope:
            print(f"{heading}Running on {who}\nLoading dataset\n", end="", flush=True)  # whole, so that none mixes
            time.sleep(2)
        dist.barrier()
    dist.destroy_process_group()
