"""What starting costs: `python tests/benchmarks/startup.py [--rounds 21] [--python python3.12 ...]`.

CPU seconds (user and system) of fresh interpreters, in turns: `python -c pass`, `python -c "import mldebug"` and
`python -m mldebug --help`. Of each the median and the smallest. Bars: --help within twice the bare interpreter plus 60
ms, and the import within 10 ms of it, by the medians of the differences between neighbours. Exit status 1 if one is
missed. Interpreters other than this one need no packages.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"bare": ("-c", "pass"), "import": ("-c", "import mldebug"), "help": ("-m", "mldebug", "--help")}
HELP_FACTOR, HELP_MORE, IMPORT_MORE = 2.0, 0.060, 0.010  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="PATH")
    args = parser.parse_args()
    results = [measure(python, args.rounds) for python in args.python]
    return 0 if all(results) else 1


def measure(python: str, rounds: int) -> bool:
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, words in PROGRAMS.items():
            took = cpu_of([python, *words])
            if number:  # the first of each compiles what it imports
                seconds[name].append(took)
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{version}, {rounds} rounds, ms of CPU")
    for name, words in PROGRAMS.items():
        median, least = statistics.median(seconds[name]), min(seconds[name])
        print(f"  {' '.join(('python', *words)):<28}{1e3 * median:7.1f} median{1e3 * least:7.1f} least")
    bare = statistics.median(seconds["bare"])
    more = {name: statistics.median(map(float.__sub__, seconds[name], seconds["bare"])) for name in ("import", "help")}
    bars = {"import": IMPORT_MORE, "help": (HELP_FACTOR - 1) * bare + HELP_MORE}
    for name, bar in bars.items():
        verdict = "ok" if more[name] <= bar else "MISSED"
        print(f"  {name}: {1e3 * more[name]:.1f} ms over bare Python, bar {1e3 * bar:.1f} ms: {verdict}")
    return all(more[name] <= bar for name, bar in bars.items())


def cpu_of(command: list[str]) -> float:
    """User and system seconds of this program, from the kernel."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
