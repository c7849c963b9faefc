#!/usr/bin/env python
"""The intermediate size of a SwiGLU MLP near 8/3 of the hidden size whose matrix
products are fastest on this GPU.

    ./swiglu-maf-bench.py --hidden 4096 --ffn 11008 --distance 100 --step 4

What one used to edit into the file are options here; TFLOPS are those of all
three products, forward and backward. --report says which size to take and why.
Without a GPU that is by rule, unless --cpu measures on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import Parser, add_common, count, file_to_write
from mldebug.cli._tool import run_tool
from mldebug.core.device import find_device
from mldebug.core.report import emit
from mldebug.perf.matmul._swiglu import best_swiglu
from mldebug.perf.matmul._swiglu_classic import heading, table


def main() -> None:
    parser = Parser(prog="swiglu-maf-bench.py", description=__doc__)
    add = parser.add_argument
    add("--hidden", "--d-hidden", type=count, default=4096, metavar="N", help="hidden size of the model (4096)")
    add("--ffn", "--d-ff-base", type=count, default=0, metavar="N", help="size to search around (8/3 of hidden)")
    add("--batch-size", type=count, default=4, metavar="N", help="sequences in a batch (4)")
    add("--seq", type=count, default=0, metavar="N", help="tokens of a sequence (as many as hidden)")
    add("--distance", type=count, default=100, metavar="N", help="how far around it (100)")
    add("--step", type=count, default=4, metavar="N", help="between sizes (4)")
    add("--tp", type=count, default=1, metavar="N", help="ranks that share the MLP (1)")
    add("--dtype", default="float16", help="what the products compute in (float16)")
    add("--cpu", action="store_true", help="measure on the CPU where there is no accelerator")
    add("--report", action="store_true", help="in place of the table: what to take, and why")
    add_common(parser, output="write the report to FILE")
    args = parser.parse_args()
    how = {"output": file_to_write("--output", args.output), "quiet": args.quiet, "no_color": args.no_color}
    classic = not (args.json or args.report or args.quiet or args.output) and (args.cpu or find_device().kind != "cpu")
    near, tokens = args.ffn or int(8 * args.hidden / 3), args.batch_size * (args.seq or args.hidden)
    print(heading(args.hidden, near, args.distance, args.step) if classic else "", end="", flush=True)
    report = best_swiglu(
        args.hidden, near, tp=args.tp, tokens=tokens, distance=args.distance, step=args.step, dtype=args.dtype,
        measure=args.cpu or None,
    )  # fmt: skip
    print(table(report), end="") if classic else emit(report, json=args.json, **how)


if __name__ == "__main__":
    run_tool("swiglu-maf-bench", main)
