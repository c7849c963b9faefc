"""busbw of all_reduce beside nccl-tests, in turns, at the same sizes and with the same NCCL library.

    python tests/benchmarks/comms_vs_nccl_tests.py --nccl-tests BUILD_DIR [--gpus 2] [--rounds 2] [--last 16G]

BUILD_DIR has nccl-tests' all_reduce_perf. From 16 MiB the bar is within 3% of it, below within 10% of its -G 20. Also
prints the wall time of the whole sweep, start included (bar: 30 s). With --mixing it also prints how long a
call takes in a graph with NCCL's support for mixing graphs with other calls, and without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from mldebug.cluster import comms
report = comms(**json.loads(sys.argv[1]))
if not report.ok:
    sys.exit(report.text())
"""
LIMIT = 16 << 20
Figures = dict[tuple[int, str], float]


def library() -> str:
    """The folder of the NCCL that torch loads."""
    try:
        import nvidia.nccl

        return str(Path(next(iter(nvidia.nccl.__path__))) / "lib")
    except ImportError:  # a torch that carries it elsewhere
        import torch

        return str(Path(torch.__file__).parent / "lib")


def theirs(folder: str, gpus: int, first: int, last: int, graph: int) -> Figures:
    """(bytes, place) -> busbw."""
    path = os.pathsep.join(filter(None, [library(), os.environ.get("LD_LIBRARY_PATH")]))
    done = subprocess.run(
        [str(Path(folder) / "all_reduce_perf"), "-b", str(first), "-e", str(last), "-f", "2", "-g", str(gpus), "-n",
         "20", "-w", "5", "-G", str(graph)],
        env={**os.environ, "LD_LIBRARY_PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: Figures = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) >= 13 and words[0].isdecimal():
            found[int(words[0]), "out_of_place"], found[int(words[0]), "in_place"] = float(words[7]), float(words[11])
    return found


def ours(gpus: int, first: int, last: int, **more: Any) -> tuple[dict[str, Any], float]:
    """(the document, seconds of wall time)."""
    with tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/run.json"
        told = {"first": first, "last": last, "nproc": gpus, "output": output, **more}
        began = time.monotonic()
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(told)], env=env, check=True)
        return json.loads(Path(output).read_text(encoding="utf-8")), time.monotonic() - began


def mixing(gpus: int) -> None:
    """Microseconds of a call in a graph, in place."""
    for value in ("0", "1"):
        os.environ["NCCL_GRAPH_MIXING_SUPPORT"] = value
        told, _ = ours(gpus, 32 << 10, 4 << 20, in_place_only=True, mode="graph", check=0)
        text = ", ".join(f"{row['bytes'] >> 10} KiB {row['in_place']['us']:.1f}" for row in told["rows"])
        print(f"mixing {value}: us {text}")
    del os.environ["NCCL_GRAPH_MIXING_SUPPORT"]


def figures(document: dict[str, Any]) -> dict[tuple[int, str], tuple[float, str]]:
    return {
        (row["bytes"], place): (row[place]["busbw"], row[place]["mode"])
        for row in document["rows"]
        for place in ("out_of_place", "in_place")
        if place in row
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nccl-tests", required=True, metavar="BUILD_DIR")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--last", default="16G")
    parser.add_argument("--mixing", action="store_true")
    args = parser.parse_args()
    last = int(args.last[:-1]) << {"M": 20, "G": 30}[args.last[-1]]
    mine: dict[tuple[int, str], list[float]] = {}
    other: dict[tuple[int, str], list[float]] = {}
    modes: dict[tuple[int, str], str] = {}
    for turn in range(args.rounds):
        began = time.monotonic()
        for part in (
            theirs(args.nccl_tests, args.gpus, 32 << 10, LIMIT // 2, 20),
            theirs(args.nccl_tests, args.gpus, LIMIT, last, 0),
        ):
            for key, value in part.items():
                other.setdefault(key, []).append(value)
        between = time.monotonic()
        document, wall = ours(args.gpus, 32 << 10, last)
        for key, (value, mode) in figures(document).items():
            mine.setdefault(key, []).append(value)
            modes[key] = mode
        if not turn:
            print(f"{document['gpu']} x {document['world']}, {document['backend']} {document['nccl']}")
        start = document["start_seconds"]
        print(
            f"round {turn + 1}: nccl-tests {between - began:.1f} s, ours {wall:.1f} s ({start:.1f} s until the start)"
        )
    print(f"{'bytes':>12} {'place':>12} {'mode':>7} {'ours':>8} {'theirs':>8}  ratio  bar")
    misses = 0
    for key in sorted(mine):
        if key not in other:
            continue
        a, b = statistics.median(mine[key]), statistics.median(other[key])
        bar = 0.03 if key[0] >= LIMIT else 0.10
        missed = a / b < 1 - bar
        misses += missed
        print(
            f"{key[0]:>12} {key[1]:>12} {modes[key]:>7} {a:>8.2f} {b:>8.2f} {a / b:>6.3f}  {1 - bar:.2f}"
            + (" MISSED" if missed else "")
        )
    print(f"{misses} missed of {len(mine)}")
    if args.mixing:
        mixing(args.gpus)


if __name__ == "__main__":
    main()
