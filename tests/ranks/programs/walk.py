"""Three steps on each rank, with a breakpoint in the second: `walk.py RANKS [timeout [condition]]`. Loads no torch."""

import sys
import time

from mldebug.ranks import breakpoint_on, rank


def step(number):
    secret = 1000 * rank() + number
    if number == 1:
        breakpoint_on(
            [int(one) for one in sys.argv[1].split(",")],
            timeout=float(sys.argv[2]) if len(sys.argv) > 2 else None,
            condition=lambda: len(sys.argv) < 4 or sys.argv[3] == "yes",
        )
        secret += 10
    return secret


total = 0
for number in range(3):
    try:
        total += step(number)
    except Exception as exc:
        sys.stdout.write(f"rank {rank()} caught {type(exc).__name__}\n")  # a line is one write, also where unbuffered
        raise
sys.stdout.write(f"rank {rank()} total {total} tracer {sys.gettrace()}\n")
if "torch" in sys.modules:
    sys.exit(9)
time.sleep(0.1)
