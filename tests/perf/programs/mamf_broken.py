"""`mldebug mamf` on a machine where something happens in a phase of it: mamf_broken.py KIND PHASE [options].

It happens with the first product after the first block of that phase was noted. KIND is oom (no memory from then on for
products of more than 100,000 numbers), gone (the device fails for good), a signal that the process sends to itself, or
none.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from mldebug.cli._mamf import Parser, add_arguments, run
from mldebug.core.errors import MldebugError
from mldebug.perf.matmul._results import ResultFile

if __name__ == "__main__":
    kind, phase = sys.argv[1:3]
    product, note, seen = torch.mm, ResultFile.block, []

    def block(self: ResultFile, now: str, *more: Any) -> None:
        note(self, now, *more)
        if now == phase:
            seen.append(now)

    def mm(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        if seen and kind == "oom" and a.shape[0] * b.shape[1] > 100_000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if seen and kind == "gone":
            raise RuntimeError("CUDA error: unspecified launch failure")
        if seen and kind.startswith("SIG"):
            seen.clear()
            os.kill(os.getpid(), getattr(signal, kind))
        return product(a, b, **more)

    torch.mm, ResultFile.block = mm, block
    parser = Parser(prog="mldebug mamf")
    add_arguments(parser)
    try:
        sys.exit(run(parser.parse_args(sys.argv[3:])))
    except MldebugError as exc:
        print(exc, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
