"""hung more-iterations 0: one rank has a batch more, and others are an epoch ahead."""

import torch
import torch.distributed as dist


def train(loader):
    for _i, x in enumerate(loader):
        dist.all_reduce(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = list(range(100 + (4 if rank == 0 else 0)))
    loader = torch.utils.data.DataLoader(torch.arange(len(data)).float(), batch_size=4)
    for _epoch in range(2):
        train(loader)
        dist.broadcast(torch.ones(1), src=1)


main()
