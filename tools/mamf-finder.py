#!/usr/bin/env python
"""Find the maximum achievable matmul FLOPS (MAMF) of an accelerator.

The classic script's command line and tables, over the classic way of measuring:

    python mamf-finder.py --m_range 0 20480 256 --n 4096 --k 4096 --verbose

The figures are of calls with pauses for cache flushes in between;
`mldebug mamf` finds what the card holds under load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._tool import run_tool

RESULTS = Path(__file__).resolve().parent / "results" / "mm.out"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in "mnk":
        group = parser.add_mutually_exclusive_group(required=True)
        group.add_argument(f"--{size}", nargs="+", type=int, help=f"sizes of {size}")
        group.add_argument(f"--{size}_range", nargs=3, type=int, metavar=("START", "STOP", "STEP"))
    parser.add_argument("--num_iterations", type=int, default=100)
    parser.add_argument("--num_warmup_iterations", type=int, default=50)
    parser.add_argument("--cuda_device", type=int, default=0)
    parser.add_argument("--output_file", default=RESULTS, help="results/mm.out beside this file")
    parser.add_argument("--notes", default="", help="added to the header of the output file")
    parser.add_argument("--verbose", default=True, action=argparse.BooleanOptionalAction)
    parser.add_argument("--dtype", default="bfloat16")
    args = vars(parser.parse_args())
    sizes = [(size, args.pop(size), args.pop(f"{size}_range")) for size in "mnk"]
    from mldebug.perf.matmul._classic_options import classic_main

    return classic_main(sizes, **args)


if __name__ == "__main__":
    run_tool("mamf-finder", main)
