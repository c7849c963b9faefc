"""What looks after the ranks of a benchmark, with faults: COMMS_FAULTS is a list of {rank, step, bytes, do}."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from mldebug.cluster.collectives import _calls, _node, _worker

FAULTS = json.loads(os.environ.get("COMMS_FAULTS", "[]"))
plain = _worker.Worker.at
plain_call = _calls.Case.call


def fault(rank: int, step: str, size: int) -> str:
    for one in FAULTS:
        if one["rank"] == rank and one["step"] == step and one.get("bytes", size) == size:
            return str(one["do"])
    return ""


def patched(step: str) -> Any:
    """A step that does what its fault says, as soon as the rank is in it."""
    real = getattr(_worker.Worker, f"do_{step}")

    def do(worker: _worker.Worker, told: Any) -> Any:
        what = fault(worker.rank, step, told.get("bytes", 0))
        if what in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        if what == "hang":
            time.sleep(3600)
        if what == "oom":
            raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(worker, told)

    return do


for name in ("init", "allocate", "warm", "time", "check", "probe"):
    setattr(_worker.Worker, f"do_{name}", patched(name))


def call(case: Any, source: Any, target: Any, nccl: Any = None) -> Any:
    """One wrong element of what comes out at a rank that corrupts; a rank that is slow in its first call."""
    real = plain_call(case, source, target, nccl)
    if fault(case.rank, "call", case.span) != "corrupt":
        return real

    def bad() -> None:
        real()
        target[-1] += 1

    return bad


_calls.Case.call = call  # type: ignore[method-assign]

if any(one["do"] == "slow" for one in FAULTS):
    import torch.distributed as dist

    real_all_reduce = dist.all_reduce

    def slow_all_reduce(*args: Any, **more: Any) -> Any:
        if any(one["rank"] == dist.get_rank() and one["do"] == "slow" for one in FAULTS):
            time.sleep(0.005)
        return real_all_reduce(*args, **more)

    dist.all_reduce = slow_all_reduce

if __name__ == "__main__":
    sys.exit(_node.main())
