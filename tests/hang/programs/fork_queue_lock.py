"""hung fork-with-lock-held 0: a DataLoader worker forked while a thread held the lock of a queue."""

import queue
import threading
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

q = queue.Queue()


def spam():
    with q.mutex:
        time.sleep(5)


class DS(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        q.put(i)
        return torch.ones(4)


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        threading.Thread(target=spam, daemon=True).start()
        time.sleep(0.2)
    for b in DataLoader(DS(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        dist.all_reduce(b)


main()
