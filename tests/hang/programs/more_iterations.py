"""hung more-iterations 2: rank 2 has one batch more than the others."""

import torch
import torch.distributed as dist


def train(batches: list[torch.Tensor]) -> None:
    for batch in batches:
        dist.all_reduce(batch)


def validate() -> None:
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    count = 5 if dist.get_rank() == 2 else 4
    train([torch.ones(4) for _ in range(count)])
    validate()


main()
