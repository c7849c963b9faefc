#!/usr/bin/env python
"""What pinned memory and copies that do not block are good for, in epoch times.

The classic script's call and table; settings are measured in turns, in the
steady state. Without a GPU there is nothing to copy to, all four rows are
alike, and stderr says so.

    ./pin-memory-non-block-bench.py --batch-size 32 --num-workers 2

For a DataLoader of your own: `mldebug dataloader -- train.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import Parser, count, seconds, whole
from mldebug.cli._tool import run_tool
from mldebug.core.device import find_device
from mldebug.perf.loader._overhead import epoch_overhead
from mldebug.perf.loader._report import Setting


class FreeSamples(torch.utils.data.Dataset):
    def __init__(self, numbers: int) -> None:
        self.tensor = torch.ones(numbers)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensor


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--num-workers", type=whole, default=5)
    parser.add_argument("--batch-size", type=count, default=100)
    parser.add_argument("--step-seconds", type=seconds, default=0.2, help="what training takes for a batch")
    parser.add_argument("--numbers", type=count, default=2**18, help="fp32 numbers in a sample")
    parser.add_argument("--rounds", type=count, default=3)
    args = parser.parse_args()
    device = find_device()
    gpu = device if device.kind != "cpu" else None
    if gpu is None:
        print("no accelerator here: nothing is pinned and nothing is copied", file=sys.stderr)
    prefetch, both = 2 if args.num_workers else 0, (True, False)
    settings = [Setting(args.num_workers, prefetch, pin, free) for pin in both for free in both]
    data, options = FreeSamples(args.numbers), {"step": args.step_seconds, "rounds": args.rounds}
    for one, taken in epoch_overhead(data, settings, batch_size=args.batch_size, device=gpu, **options).items():
        print(f"pin_memory={one.pin_memory!s:>5}, non_blocking={one.non_blocking!s:>5}: average time: {taken:0.3f}")


if __name__ == "__main__":
    run_tool("pin-memory-non-block-bench", main)
