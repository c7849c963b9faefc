"""Ranks that go one after the other: `first.py CASE`. Each line says the rank, what it did, and when."""

import os
import signal
import sys
import time
from contextlib import suppress

from mldebug.ranks import (
    local_main_process_first,
    local_rank,
    main_process_by_path_first,
    main_process_first,
    rank,
    world_size,
)

case, me = sys.argv[1], rank()


def say(what):
    sys.stdout.write(f"{me} {what} {time.time():.3f}\n")
    sys.stdout.flush()


def work(what="block", seconds=0.4, main=0):
    say(f"{what}-begins")
    time.sleep(seconds if (me == main) else 0)
    say(f"{what}-ends")


@main_process_first()
def decorated(value):
    work("call")
    return value + me


@main_process_first()
def numbers():
    yield 1
    yield 2


if case.startswith("gloo"):
    import torch.distributed as dist

    dist.init_process_group("gloo")
if case in ("plain", "gloo"):
    for number in range(3):
        with main_process_first(timeout=60):
            work(f"block{number}", 0.2)
    if case == "gloo":
        with main_process_first(store=dist.distributed_c10d._get_default_store(), timeout=60):
            work("by-store")
        odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
        with main_process_first(group=odd if me % 2 else even, timeout=60):
            work("by-group", main=me % 2)
        dist.destroy_process_group()
elif case == "at-the-end":  # rank 0, which has the store, has nothing else to do
    time.sleep(0 if me == 0 else 1.0)
    with main_process_first(timeout=20):
        say("came")
elif case == "local":
    with local_main_process_first(timeout=60):
        work("block", main=me - local_rank())
elif case == "path":
    if sys.argv[2].startswith("fake:"):  # the kinds of the first and of the second node
        from mldebug.ranks import _first
        from mldebug.ranks._mounts import Mount

        kind = sys.argv[2][5:].split(",")[me // 2]
        _first.kind_of = lambda path: (kind, Mount("/", "nfs4" if kind == "shared" else "shinyfs"))
    with main_process_by_path_first(sys.argv[2], timeout=60):
        work("block", main=me - local_rank())
elif case == "nested":
    with main_process_first(timeout=60):
        work("outer")
        with local_main_process_first(timeout=60):
            work("inner")
            with main_process_first(timeout=60):
                work("deep")
elif case == "decorated":
    say(f"got-{decorated(10)}-{decorated(20)}-{sum(numbers())}")
elif case == "error":
    with main_process_first(timeout=60):
        work()
        if me == 0:
            raise ValueError("shard 7 is\nbroken")
elif case == "exit":
    with main_process_first(timeout=60):
        if me == 0:
            sys.exit(3)
elif case == "interrupt":
    with main_process_first(timeout=60):
        if me == 0:
            raise KeyboardInterrupt
elif case == "kill":
    with main_process_first(timeout=60):
        if me == 0:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
elif case == "os._exit":
    with main_process_first(timeout=60):
        if me == 0:
            os._exit(4)
elif case == "follower":
    with main_process_first(timeout=60):
        if me == 1:
            raise RuntimeError("mine alone")
        work()
elif case == "slow":
    with main_process_first(timeout=1.5):
        time.sleep(4 if me == 0 else 0)
    say("done")
elif case == "some":
    if me in (1, 2):
        with main_process_first(timeout=3):
            say("never")
elif case == "skew":

    def only_two():
        with main_process_first(timeout=3):
            work("two")

    def everybody():
        with main_process_first(timeout=30):
            work("all")

    if me < 2:
        only_two()
    everybody()
elif case == "lines":
    if me == 0:
        with main_process_first(timeout=30):
            work()
    else:
        with main_process_first(timeout=30):
            work()
elif case == "caught":
    for number in range(2):
        with suppress(Exception), main_process_first(timeout=60):
            work(f"block{number}")
            if me == 0 and number == 0:
                raise ValueError("first time")
elif case == "late-store":  # rank 0 makes the store, and the group afterwards has it too
    with main_process_first(timeout=60):
        work()
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    with main_process_first(timeout=60):
        work("again")
    say(f"sum-{int(total.item())}-of-{world_size()}")
    dist.barrier()
if "torch" in sys.modules and case == "plain" and len(sys.argv) > 2:
    sys.exit(9)
