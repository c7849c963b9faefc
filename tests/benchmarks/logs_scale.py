"""How fast `logs()` reads, and in how much memory: N ranks x M lines in one mixed log, with a traceback on each.

    python tests/benchmarks/logs_scale.py --ranks 512 --lines 20000 [--files]

Prints one JSON line: MB/s, seconds of the wall clock and of the CPU, peak memory in MB, and what was found. `--files`
reads one file a rank instead.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRACEBACK = """\
Traceback (most recent call last):
  File "/app/train.py", line 88, in <module>
    main()
  File "/app/train.py", line 71, in main
    loss = step(batch)
RuntimeError: {message}
"""
VICTIM = "[1] ncclRemoteError: remote process exited or there was a network error"


def line(rank: int, number: int) -> str:
    """Three in four are alike on all ranks but for the time; the others have a number of the rank's own."""
    clock = f"2026-01-02 03:{number // 60 % 60:02d}:{number % 60:02d},{(number * 7 + rank) % 1000:03d}"
    if number % 4 == 3:
        return f"{clock} INFO train.py:71 step {number} loss {2.3 + rank / 1000 + number / 1e6:.6f} lr 3.0e-04"
    return f"{clock} INFO train.py:71 step {number} grad norm {1 + number % 17 / 16:.4f} tokens {number * 8192}"


def write_mixed(path: Path, ranks: int, lines: int) -> None:
    shuffle = random.Random(0).shuffle
    order = list(range(ranks))
    with path.open("w") as out:
        for number in range(lines):
            if number % 50 == 0:
                shuffle(order)
            out.write("".join([f"[rank{rank}]: {line(rank, number)}\n" for rank in order]))
        for rank in order:
            out.write("".join(f"[rank{rank}]: {text}\n" for text in ending(rank).splitlines()))


def write_files(folder: Path, ranks: int, lines: int) -> None:
    for rank in range(ranks):
        text = "".join([line(rank, number) + "\n" for number in range(lines)])
        (folder / f"rank-{rank}.log").write_text(text + ending(rank))


def ending(rank: int) -> str:
    return TRACEBACK.format(message="shape (4, 5) is not (4, 4)" if rank == 7 else VICTIM)


CHILD = """
import json, resource, sys, time
from mldebug.ranks import logs
before, cpu = time.perf_counter(), time.process_time()
report = logs(sys.argv[1])
seconds, cpu = time.perf_counter() - before, time.process_time() - cpu
print(json.dumps({
    "MB": round(report.size / 1e6), "lines": report.lines, "seconds": round(seconds, 2), "cpu seconds": round(cpu, 2),
    "MB/s": round(report.size / 1e6 / seconds, 1), "us/line": round(1e6 * cpu / report.lines, 2),
    "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "folded": report.folded_lines,
    "ranks": len(report.ranks), "first": report.tracebacks[0].ranks, "kinds": len(report.tracebacks)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--files", action="store_true", help="one file a rank")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) if args.files else Path(folder, "mixed.log")
        began = time.perf_counter()
        (write_files if args.files else write_mixed)(target, args.ranks, args.lines)
        print(f"written in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        done = subprocess.run([sys.executable, "-c", CHILD, str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout)
    print(json.dumps({"python": sys.version.split()[0], "files": args.files, **found}))
    assert found["first"] == [7] and found["kinds"] == 2 and found["ranks"] == args.ranks, "the wrong answer"


if __name__ == "__main__":
    main()
