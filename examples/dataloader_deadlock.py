"""The first batch never comes: workers of the DataLoader wait, and use no CPU.

    python examples/dataloader_deadlock.py

It prints:

    hung: fork-with-lock-held, rank 0
    DataLoader worker 5713 of rank 0 waits for a lock at dataloader_deadlock.py:39
      in __getitem__: the lock was held by a thread of the parent when it was
      forked, and has no owner here.
    hint: start workers by spawn or forkserver, or before the threads
    sure: high, from stacks, process state

    1 rank on 1 host (pid 5708 of alice on node7)
      [0] <module> dataloader_deadlock.py:73 > train dataloader_deadlock.py:53 >
        _get_data

    children
      rank 0: dataloader child 5713, dataloader_deadlock.py:39 in __getitem__
"""

import os
import signal
import subprocess
import sys
import threading
import time

import mldebug

CACHE = threading.Lock()


class Pictures:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with CACHE:  # in a worker: a copy of a lock that its owner, a thread of the parent, never gives back
            return index


def fill_cache():
    with CACHE:
        time.sleep(3600)  # break it: the thread holds the lock while the workers are forked


def train():
    from torch.utils.data import DataLoader

    threading.Thread(target=fill_cache, daemon=True).start()
    time.sleep(0.5)
    for batch in DataLoader(Pictures(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        print(batch)


def main():
    environment = {**os.environ, "EXAMPLE_TRAINS": "1"}
    job = subprocess.Popen([sys.executable, __file__], env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        report = mldebug.spy(pids=[job.pid])
        while not report.verdict.hung and time.monotonic() < deadline:  # it is still starting
            time.sleep(1)
            report = mldebug.spy(pids=[job.pid])
        print(report.text())
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # its workers, too
        job.wait()


if __name__ == "__main__":
    train() if "EXAMPLE_TRAINS" in os.environ else main()
