"""How fast `trace_tail` reads: many small files, and few large ones. Prints MB/s, peak memory, seconds to the answers.

    python tests/benchmarks/trace_tail_scale.py [--many 1000] [--large 4] [--gigabytes 1] [--folder /tmp]

Each size is read by a process of its own, with one rank going another way at half of its text, and once more with a
rank that logs in every step. Traces are made in a folder that is removed again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

_READ = """
import json, resource, sys
from mldebug.tracing._tail import trace_tail
report = trace_tail(sys.argv[1], pattern="optimizer", processes=int(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
peak += int(sys.argv[2]) * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
cpu = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
found = [[parting.place, parting.iteration, parting.times, len(parting.ways)] for parting in report.partings]
print(json.dumps([report.bytes, report.seconds, report.seconds_to_endings, peak, cpu, found]))
"""
_LINES_A_STEP = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=int, default=1000, help="small files, of 1 MB each")
    parser.add_argument("--large", type=int, default=4, help="large files")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of each large file")
    parser.add_argument("--processes", type=int, default=1, help="that read")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    args = parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs")
    heads = ("files", "MB each", "logs", "answer", "all", "MB/s", "s/GB", "CPU s/GB", "peak MB")
    print("  ".join(f"{head:>8}" for head in heads))
    for logs in (False, True):
        for files, size in ((args.many, 1e6), (args.large, args.gigabytes * 1e9)):
            if files:
                _measure(Path(args.folder), files, int(size), logs, args.processes)


def _measure(folder: Path, files: int, size: int, logs: bool, processes: int) -> None:
    where = Path(tempfile.mkdtemp(prefix="trace_tail_", dir=folder))
    try:
        for rank in range(files):
            _write(where, rank, files, size, odd=rank == files // 2, logs=logs and rank == 0)
        program = [sys.executable, "-c", _READ, str(where), str(processes)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, env=env)
        total, seconds, first, peak, cpu, found = json.loads(done.stdout)
        figures = (files, size / 1e6, "yes" if logs else "no", f"{first:.3f} s", f"{seconds:.1f} s")
        rates = (total / seconds / 1e6, seconds / total * 1e9, cpu / total * 1e9, peak)
        cells = [str(round(one)) if isinstance(one, float) else str(one) for one in figures]
        print("  ".join(f"{cell:>8}" for cell in [*cells, *(f"{rate:.1f}" for rate in rates)]), found, flush=True)
    finally:
        shutil.rmtree(where)


def _write(folder: Path, rank: int, world: int, size: int, odd: bool, logs: bool) -> None:
    """A loop of 60 lines a step; the odd rank takes another way once, in the middle."""
    numbers = range(10, 10 + _LINES_A_STEP - 4)
    body = "".join(f"train.py:{n:>6}: x = layer[{n}](x, mask)  # of block {n}\n" for n in numbers)
    first = f"train.py:     3: for batch in loader:\n{body}train.py:    80: if bad(loss):\n"
    last = "train.py:    91: if rank == 0:\n" + ("train.py:    92: print(loss)\n" if logs else "")
    step = f"{first}train.py:    90: optimizer.step()\n{last}"
    other = f"{first}train.py:    81: continue\n{last}"
    steps = size // (len(step) + 8 * step.count("\n"))
    with open(folder / f"trace-node{rank // 8}-{rank}-{1000 + rank}.txt", "w") as file:
        file.write(f"# mldebug trace 1 host=node{rank // 8} rank={rank} world={world} pid={1000 + rank} ")
        file.write("started=2026-03-01T12:00:00.000+00:00 python=3.12 argv=[]\n        train:1 main\n")
        at = 0
        while at < steps:
            until = min(at + 40, steps)  # 40 steps in a second
            clock = f"{at // 144000}:{at // 2400 % 60:02}:{at // 40 % 60:02} "
            timed = clock + step[:-1].replace("\n", "\n" + clock) + "\n"
            if odd and at <= steps // 2 < until:
                for number in range(at, until):
                    text = other if number == steps // 2 else step
                    file.write(clock + text[:-1].replace("\n", "\n" + clock) + "\n")
            else:
                file.write(timed * (until - at))
            at = until


if __name__ == "__main__":
    main()
