"""Is the setting that dataloader_bench picks the smallest within 3% of the best? Plain DataLoaders say, side by side.

    python tests/benchmarks/dataloader_choice.py [--seconds 30] [--rounds 5] [--classic PATH]

For datasets that wait and that compute: the pick, and then each count of workers measured without mldebug, in turns,
in the steady state. Prints the rate of the pick as a share of the best, and whether a smaller count is within 3% too.
`--classic` names a num-workers-bench.py to time against: it prints one table, and says nothing of a choice.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mldebug.perf.loader._bench import dataloader_bench
from mldebug.perf.loader._choose import useful
from mldebug.perf.loader._report import Setting


class Waits(Dataset[Any]):
    seconds = 0.004

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(1000)


class Computes(Waits):
    def __getitem__(self, index: int) -> torch.Tensor:
        value = index
        for _ in range(20_000):  # about a millisecond of Python
            value = value * 1103515245 + 12345 & 0x7FFFFFFF
        return torch.full((1000,), float(value))


def plain_rate(dataset: Dataset[Any], batch: int, workers: int, seconds: float) -> float:
    """Samples a second after three waves of batches."""
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**8)  # type: ignore[arg-type]
    loader = iter(DataLoader(dataset, batch, sampler=sampler, num_workers=workers))
    for _ in range(3 * max(1, workers)):
        next(loader)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or count % max(1, workers):
        next(loader)
        count += 1
    return batch * count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--classic", metavar="PATH")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    for dataset, batch, step in ((Waits(), 16, None), (Waits(), 16, 0.025), (Computes(), 16, None)):
        began = time.perf_counter()
        report = dataloader_bench(dataset, batch_size=batch, step_seconds=step, seconds=args.seconds)
        took = time.perf_counter() - began
        counts = sorted({row.setting.num_workers for row in report.rows})
        seen: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(args.rounds):
            for count in random.sample(counts, len(counts)):
                rate = plain_rate(dataset, batch, count, 1.5)
                seen[count].append(useful(Setting(count, 2), rate, batch, step))
        rates = {count: statistics.median(found) for count, found in seen.items()}
        best = max(rates.values())
        pick = report.chosen.num_workers if report.chosen is not None else -1
        smallest = min(count for count, rate in rates.items() if rate >= 0.97 * best)
        noise = max((max(found) - min(found)) / 2 / statistics.median(found) for found in seen.values())
        print(
            f"{type(dataset).__name__:9} step {step}: picked {pick} workers in {took:.1f} s: "
            f"{100 * rates[pick] / best:.1f}% of the best; the smallest within 3% is {smallest}; "
            f"noise +-{100 * noise:.1f}%"
        )
        print("  " + "  ".join(f"{count}: {rate:.0f}/s" for count, rate in rates.items()))
    if args.classic:
        began = time.perf_counter()
        done = subprocess.run([sys.executable, args.classic], capture_output=True, text=True, check=False)
        print(f"classic: {time.perf_counter() - began:.1f} s, exit status {done.returncode}\n{done.stdout}")


if __name__ == "__main__":
    main()
