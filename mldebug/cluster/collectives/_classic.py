"""The tables of the classic all_reduce_bench.py and of its kin that compare objects with tensors."""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable

from mldebug.cluster.collectives._comms import comms
from mldebug.cluster.collectives._report import CommsReport
from mldebug.cluster.collectives._save import Saver
from mldebug.cluster.collectives._table import size_text
from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.world import world


def run_classic(tool: str, measure: Callable[[], CommsReport], show: Callable[[CommsReport], None]) -> int:
    """Measure, let rank 0 print, and return the status: 0, 1 for trouble, 2 for wrong usage, 130 for Ctrl-C.

    sys.exit(run_classic("all_reduce_bench", comms, lambda report: print_classic(report, 20, 5)))
    """
    try:
        report = measure()
    except MldebugError as error:
        print(f"{tool}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # Ctrl-C later than that is in the report
        print(f"{tool}: interrupted before anything was measured", file=sys.stderr)
        return 130
    if world().rank == 0:
        show(report)
    return 0 if report.ok else 130 if report.evidence["ended"] == "interrupted" else 1


def objects_main(tool: str, other: str) -> int:
    """The command line of a tool that compares all_gather_object with `other` ("all_gather" or "all_reduce").

    sys.exit(objects_main("all_gather_object_vs_all_gather", "all_gather"))
    """
    parser = argparse.ArgumentParser(prog=f"{tool}.py")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--backend", default="auto", help="gloo, for a try on CPUs")
    parser.add_argument("--nproc", type=int, help="ranks to start where no launcher did")
    args = parser.parse_args()
    if args.calls < 1:
        parser.error(f"--calls {args.calls}: give 1 or more")
    return run_classic(
        tool,
        lambda: comms(objects=args.calls, backend=args.backend, nproc=args.nproc),
        lambda report: print_objects(report, ("all_gather_object", other)),
    )


def print_classic(report: CommsReport, iters: int, warmup: int, plot: str = "") -> None:
    """Environment, a Markdown table of payload, busbw and algbw, and the legend; a plot into `plot`."""
    told = report.evidence
    how = f"{told['world']} ranks ({warmup} warmups / {iters} trials):\n"
    print("\nEnvironment:")
    print(f"- software: torch={told['torch']}, {told['backend']}={told['nccl'] or 'of torch'}")
    print(f"- hardware: {told['gpu']}\n")
    if told["stability"]:
        size = told["stability"]["bytes"]
        factor = 2 * (told["world"] - 1) / told["world"]
        print(f"The {size / 2**30:g}GiB payload bandwidth of all_reduce over {how}")
        print("|    busbw   |    algbw   |\n| ---------: | ---------: |")
        for rate in told["stability"]["busbw"]:
            print(f"| {rate:6.2f}GBps | {rate / factor:6.2f}GBps |")
    else:
        print(f"The average bandwidth of all_reduce over {how}")
        print("| payload |    busbw   |    algbw   |\n| ------: | ---------: | ---------: |")
        for row in report.rows:
            cell, size = row["in_place"], size_text(row["bytes"]).replace(" ", "")
            print(f"| {size:>7} | {cell['busbw']:6.2f}GBps | {cell['algbw']:6.2f}GBps |")
    if plot and report.rows:
        _draw(report, plot)
    print("\nLegend: 1KiB = 2**10 Bytes, 1MiB = 2**20 Bytes, 1GiB = 2**30 Bytes")
    print("        1GBps = 10**9 Bytes per second (networking bw spec convention)")
    print(f"Elapsed time: {datetime.timedelta(seconds=int(told['seconds']))}")
    if not report.ok:
        print("\n" + report.text())


def print_objects(report: CommsReport, names: tuple[str, ...]) -> None:
    """The seconds of all calls by each of these ways, for each rank."""
    told = report.evidence["objects"]
    if not told:
        print(report.text())
        return
    wide = max(map(len, names))
    for name in names:
        for micros in told["us"][name]:
            print(f"{name:<{wide}}={micros * told['iters'] / 1e6}")
    first, last = (statistics.fmean(told["us"][name]) for name in (names[0], names[-1]))
    print(f"{names[-1]} is {first / last:.1f}x faster than {names[0]}")


def _draw(report: CommsReport, plot: str) -> None:
    try:
        with Saver(plot) as saver:
            saver.end(report)
        print(f"\n*** Plotting results into {plot}")
    except MldebugError as error:
        print(f"\n!!! no plot: {error}")
