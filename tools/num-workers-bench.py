#!/usr/bin/env python
"""What num_workers is good for: an epoch's time beside its steps, with a
transform that takes 5 ms for each sample.

The classic script's call and table, with or without a GPU; settings are
measured in turns, in the steady state:

    ./num-workers-bench.py --max-workers 8 --sample-seconds 0.01 --batch-size 32

For a DataLoader of your own: `mldebug dataloader -- train.py`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import Parser, count, seconds, whole
from mldebug.cli._tool import run_tool
from mldebug.core.device import find_device
from mldebug.perf.loader._overhead import epoch_overhead
from mldebug.perf.loader._report import Setting


class SlowTransform(torch.utils.data.Dataset):
    def __init__(self, seconds: float, numbers: int) -> None:
        self.seconds, self.tensor = seconds, torch.ones(numbers)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.tensor


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--max-workers", type=whole, default=4)
    parser.add_argument("--batch-size", type=count, default=100)
    parser.add_argument("--step-seconds", type=seconds, default=0.2, help="what training takes for a batch")
    parser.add_argument("--sample-seconds", type=seconds, default=0.005, help="what the transform takes")
    parser.add_argument("--numbers", type=count, default=2**18, help="fp32 numbers in a sample")
    parser.add_argument("--rounds", type=count, default=3)
    args = parser.parse_args()
    device = find_device()
    gpu = device if device.kind != "cpu" else None
    settings = [Setting(n, 2 if n else 0, gpu is not None, gpu is not None) for n in range(args.max_workers + 1)]
    data, options = SlowTransform(args.sample_seconds, args.numbers), {"step": args.step_seconds, "rounds": args.rounds}
    for setting, taken in epoch_overhead(data, settings, batch_size=args.batch_size, device=gpu, **options).items():
        print(f"num_workers={setting.num_workers}: average time: {taken:0.3f}")


if __name__ == "__main__":
    run_tool("num-workers-bench", main)
