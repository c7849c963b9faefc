"""hung dataloader-worker 1: a DataLoader worker waits for an answer from the network."""

import socket

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class DS(Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 64

    def __getitem__(self, i):
        if self.rank == 1 and i == 17:
            import urllib.request

            srv = socket.socket()
            srv.bind(("127.0.0.1", 0))
            srv.listen(5)
            urllib.request.urlopen(f"http://127.0.0.1:{srv.getsockname()[1]}/x").read()

        return torch.ones(4) * i


def main():
    dist.init_process_group("gloo")
    dl = DataLoader(DS(dist.get_rank()), batch_size=4, num_workers=1, multiprocessing_context="fork")
    for _step, batch in enumerate(dl):
        dist.all_reduce(batch)


if __name__ == "__main__":
    main()
