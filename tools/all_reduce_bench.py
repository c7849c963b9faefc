#!/usr/bin/env python
"""busbw of all_reduce from 32 KiB to 16 GiB, with the classic script's options and tables, over `mldebug.comms()`.

    python -m torch.distributed.run --nproc_per_node 8 all_reduce_bench.py
    all_reduce_bench.py --profile_stability --payload_size_in_gib 0.5

Below 16 MiB a CUDA graph is replayed, so that figures are not those of launching a call. Ctrl-C ends it with
what was measured until then. The plot is drawn where matplotlib is installed. See docs/comms.md.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli._parser import count, whole
from mldebug.cluster import comms
from mldebug.cluster.collectives._classic import print_classic, run_classic
from mldebug.cluster.collectives._report import CommsReport


def main() -> int:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=0, help="not used; a launcher may pass it")
    parser.add_argument("--num_iterations", type=count, default=20, help="calls that are timed")
    parser.add_argument("--num_warmup_iterations", type=whole, default=5, help="calls before these")
    parser.add_argument("--payload_size_in_gib", type=float, help="one payload, such as 4 (GiB)")
    parser.add_argument("--profile_stability", action="store_true", help="each call of one payload by itself")
    parser.add_argument("--backend", default="auto", help="gloo, for a try on CPUs")
    parser.add_argument("--nproc", type=count, help="ranks to start where no launcher did")
    args = parser.parse_args()
    if args.profile_stability and args.payload_size_in_gib is None:
        parser.error("--profile_stability needs --payload_size_in_gib, for example 0.5")
    if args.payload_size_in_gib is not None and not 8 <= args.payload_size_in_gib * 2**30 < 2**44:
        parser.error(f"--payload_size_in_gib {args.payload_size_in_gib} is no payload: give GiB, for example 4")
    size = int((args.payload_size_in_gib or 0) * 2**30)
    sizes = {"first": size, "last": size} if size else {}

    def show(report: CommsReport) -> None:
        kind = "profile" if args.profile_stability else "mean"
        plot = f"busbw-{kind}-{socket.gethostname()}-{report.evidence['world']}.png"
        print_classic(report, args.num_iterations, args.num_warmup_iterations, plot)

    def measure() -> CommsReport:
        return comms(
            iters=args.num_iterations, warmup=args.num_warmup_iterations, in_place_only=True, backend=args.backend,
            nproc=args.nproc, stability=size if args.profile_stability else 0, **sizes,
        )  # fmt: skip

    return run_classic("all_reduce_bench", measure, show)


if __name__ == "__main__":
    sys.exit(main())
