"""A launcher as small as can be: `launch.py SIZE OUT script args`. Its ranks are sessions of their own, as torchrun's.

OUT is a folder for what ranks print, or "-" for the terminal.
"""

import os
import subprocess
import sys

size, out = int(sys.argv[1]), sys.argv[2]
ranks = []
for rank in range(size):
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    stream = None if out == "-" else os.open(f"{out}/{rank}", os.O_WRONLY | os.O_CREAT)
    ranks.append(
        subprocess.Popen(
            [sys.executable, *sys.argv[3:]], env={**os.environ, **numbers}, stdout=stream, start_new_session=True
        )
    )
try:
    status = [one.wait() for one in ranks]
except KeyboardInterrupt:
    for one in ranks:
        one.send_signal(2)
    status = [one.wait() for one in ranks]
print("statuses", status, flush=True)
sys.exit(max(map(abs, status)))
