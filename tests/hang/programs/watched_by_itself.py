"""hung skipped-collective 1: the job has hang_watchdog in it; the arguments say what rank 1 does and how it is set."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from mldebug import hang_watchdog, mark


def called(report):
    print("called:", json.dumps([report.verdict.kind, report.verdict.culprits, dist.get_rank()]), flush=True)


def train(what):
    for step in range(30):
        mark(step)
        if dist.get_rank() == 1 and step == 5:
            if what == "skip":
                continue
            if what == "gil":
                import re

                re.match(r"(a+)+$", "a" * 64 + "!")
            if what == "raise":
                raise SystemExit(3)
        dist.all_reduce(torch.ones(4))
        time.sleep(0.02)
        if what == "slow" and step % 10 == 0:
            time.sleep(1.5)
    dist.barrier()


what, on_hang, *rest = sys.argv[1:]
dist.init_process_group("gloo")
print("pid", os.getpid(), flush=True)
with hang_watchdog(timeout=3, on_hang=called if on_hang == "call" else on_hang, output=rest[0] if rest else None):
    train(what)
dist.destroy_process_group()
