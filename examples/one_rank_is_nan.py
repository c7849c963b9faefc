"""One of two ranks has inf in its batch: without help the other hangs in a collective, or averages the NaN in.

    python examples/one_rank_is_nan.py

It prints:

    rank 0 stops: DebugUnderflowOverflow: inf in the model's input[0], step 3, forward, rank 1
    rank 1 stops: DebugUnderflowOverflow: inf in the model's input[0], step 3, forward, rank 1
"""

import os
import subprocess
import sys
import tempfile


def train(rank):
    import torch
    import torch.distributed as dist

    from mldebug import DebugUnderflowOverflow, NumericsError

    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    DebugUnderflowOverflow(parallel).quiet()
    try:
        for step in range(6):
            batch = torch.randn(3, 4)
            if rank == 1 and step == 3:
                batch[2, 1] = float("inf")  # break it
            parallel(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except NumericsError as stopped:  # on both ranks, in the same step
        print(f"rank {rank} stops: {stopped.message.splitlines()[0]}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder]  # as torchrun would start them
        job = {**os.environ, "WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(command, env={**job, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, stdout=subprocess.PIPE)
            for rank in (0, 1)
        ]
        for rank in ranks:
            print(rank.communicate(timeout=120)[0].decode(), end="")


if __name__ == "__main__":
    train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
