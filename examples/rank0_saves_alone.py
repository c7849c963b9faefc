"""All ranks stand still at step 3, where the checkpoint is written. Which one holds them up, and where?

    python examples/rank0_saves_alone.py

It prints:

    hung: rank-guarded-collective, rank 0
    Rank 0 waits in barrier at rank0_saves_alone.py:33 in save_checkpoint under
      `if rank == 0`, which rank 1 cannot pass; rank 1 waits in all_reduce at
      rank0_saves_alone.py:44 in train.
    hint: let all ranks make the call, and keep only the writing under the
      condition
    sure: high, from program text, stacks

    2 ranks on 1 host (pids 9479-9480 of alice on node7)
      [0-1] <module> rank0_saves_alone.py:67
        [0] train rank0_saves_alone.py:43 > save_checkpoint rank0_saves_alone.py:33
          > barrier
        [1] train rank0_saves_alone.py:44 > all_reduce
"""

import os
import subprocess
import sys
import tempfile
import time

import mldebug


def save_checkpoint(dist, rank):
    if rank == 0:
        dist.barrier()  # break it: only rank 0 comes here


def train(rank):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    for step in range(5):
        if step == 3:
            save_checkpoint(dist, rank)
        dist.all_reduce(torch.ones(4) * rank)


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]  # as torchrun would start them
        job = {**os.environ, "WORLD_SIZE": "2"}
        ranks = [subprocess.Popen(command, env={**job, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}) for rank in (0, 1)]
        try:
            deadline = time.monotonic() + 120
            report = mldebug.spy(pids=[rank.pid for rank in ranks])  # in a terminal: mldebug spy
            while not report.verdict.hung and time.monotonic() < deadline:  # they are still starting
                time.sleep(1)
                report = mldebug.spy(pids=[rank.pid for rank in ranks])
            print(report.text())
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.wait()


if __name__ == "__main__":
    train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
