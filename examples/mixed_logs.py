"""Four ranks wrote into one log, and one of them failed: which, and why?

    python examples/mixed_logs.py

It prints:

    1 kind of traceback; first by order in the log: [2]: ValueError: shard 2 has no
    sample 4
    [...]
        Traceback (most recent call last):
          File "examples/mixed_logs.py", line 70, in <module>
            train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
    [...]
          File "examples/mixed_logs.py", line 48, in train
            load(rank, step)
          File "examples/mixed_logs.py", line 42, in load
            raise ValueError(f"shard {rank} has no sample {step}")  # break it
    [...]
        ValueError: shard 2 has no sample 4
    [...]
    no traceback: [0-1,3]; last line: step 5 loss 5.00
    [...]
    7 folded lines:
    [0-3] step 0 loss 10.00
    [0-3] step 1 loss 9.00
    [0-3] step 2 loss 8.00
    [0-3] step 3 loss 7.00
    [...]
"""

import os
import subprocess
import sys
import tempfile
import time

import mldebug


def load(rank, step):
    if rank == 2 and step == 4:
        raise ValueError(f"shard {rank} has no sample {step}")  # break it
    return rank + step


def train(rank):
    for step in range(6):
        load(rank, step)
        print(f"step {step} loss {10 - step:.2f}", flush=True)
        time.sleep(0.02)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        # printflock keeps lines whole and puts the rank before them; logs reads other prefixes, too
        command = [sys.executable, "-m", "mldebug", "printflock", "--prefix", "[{rank}]:", "--", __file__]
        job = {**os.environ, "WORLD_SIZE": "4"}
        with open("job.log", "w") as stream:
            ranks = [
                subprocess.Popen(command, env={**job, "RANK": str(rank)}, stdout=stream, stderr=stream)
                for rank in range(4)
            ]
            for rank in ranks:
                rank.wait()
        print(mldebug.logs("job.log").text())  # the command is `mldebug logs job.log`


if __name__ == "__main__":
    train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
