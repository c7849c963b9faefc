"""One of three ranks is gone, and no log says why: what did it do last?

    python examples/dies_silently.py

It prints:

    exit codes [0, 0, -9]
    3 of 3 ranks
    rank 2 did not end the trace: killed, or still running
    ranks part at dies_silently.py:39 in iteration 7 (dies_silently.py:37 load), and
        never meet again:
      after if rank == 2 and step == 7:
      rank 2 -> dies_silently.py:    40:         os.kill(os.getpid(), signal.SIGK...
      rank 0-1 -> dies_silently.py:    41:     return len(path)
    all ranks wrote their last line within 0.5 s of each other

    last lines
    rank  time     line
    2     0:00:00  dies_silently.py:    38:     path = f"shard-{rank}-{step}"
                   dies_silently.py:    39:     if rank == 2 and step == 7:
                   dies_silently.py:    40:         os.kill(os.getpid(), signal.S...
    0-1   0:00:01  dies_silently.py:    45:     for step in range(12):
                   dies_silently.py:    48:     return samples
                   dies_silently.py:    63:     train(int(os.environ["RANK"])) if...
"""

import os
import signal
import subprocess
import sys
import tempfile
import time

import mldebug


def load(rank, step):
    path = f"shard-{rank}-{step}"
    if rank == 2 and step == 7:
        os.kill(os.getpid(), signal.SIGKILL)  # break it: as the kernel does when memory runs out
    return len(path)


def train(rank):
    for step in range(12):
        samples = load(rank, step)
        time.sleep(0.1)
    return samples


def main():
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mldebug", "trace", "-q", "-o", folder, "--", __file__]
        job = {**os.environ, "WORLD_SIZE": "3"}
        ranks = [
            subprocess.Popen(command, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(3)
        ]
        print("exit codes", [rank.wait() for rank in ranks])
        print(mldebug.trace_tail(folder).text())  # the command is `mldebug trace-tail FOLDER`


if __name__ == "__main__":
    train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
