#!/usr/bin/env python
"""What torch.distributed itself takes per GPU; watch the NV column, which is what
nvidia-smi shows. The classic lines are printed by rank 0.

    python -u -m torch.distributed.run --nproc_per_node=2 \\
        --rdzv_endpoint localhost:6000 torch-dist-mem-usage.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import Parser
from mldebug.cli._tool import run_tool
from mldebug.core.device import host_memory
from mldebug.perf.memory._distributed import distributed_memory
from mldebug.perf.memory._reading import Reading

NAMES = {
    "init_process_group": "before barrier",
    "first barrier": "after barrier",
    "second barrier": "after 2nd barrier",
    "destroy_process_group": "after dist destroy",
}


def show(name: str, now: Reading, all_ranks: bool) -> None:
    if name in NAMES and (now.rank == 0 or all_ranks):
        card = now.card
        counts = (card.allocated, card.peak, card.reserved, card.reserved, card.used)
        cells = dict(zip(("MA", "Max_MA", "CA", "Max_CA", "NV"), counts, strict=True))
        words = " | ".join(f"{title} {(count or 0) / 2**30:0.2f} GiB" for title, count in cells.items())
        free, total = host_memory()
        host = f"used = {(total - free) / 2**30:0.2f} GiB, percent = {100 * (total - free) / total:.1f}%"
        print(f"[{now.rank}] mp: {NAMES[name]}\n[{now.rank}] mp: {words} | CPU Virtual Memory:  {host}", flush=True)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--backend", help="nccl, gloo ... (default: by the device)")
    parser.add_argument("--early", action="store_true", help="device_id goes to init_process_group")
    parser.add_argument("--all-ranks", action="store_true", help="not rank 0 alone")
    parser.add_argument("--json", action="store_true", help="the library's report in place of the lines")
    options = parser.parse_args()
    tell = None if options.json else lambda name, now: show(name, now, options.all_ranks)
    report = distributed_memory(options.backend, early=options.early, tell=tell)
    if options.json and (report.rank == 0 or options.all_ranks):
        print(report.json(), flush=True)


if __name__ == "__main__":
    run_tool("torch-dist-mem-usage", main)
