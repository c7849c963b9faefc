"""How often the verdict on a pair matrix is right: clusters that do not exist, with and without a planted fault.

    python tests/benchmarks/pairs_simulated.py [--plants 200] [--healthy 100] [--first 0] [--wrong]

Right means the kind and all culprits. Prints one line for each kind of fault, the time that 1,024 GPUs take with all
their 1,047,552 pairs, and exits with 1 when fewer than 95% are right or a healthy cluster has a culprit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mldebug.cluster.pairs._judge import judge_pairs
from tests.cluster.simulate import FAULTS, healthy, planted, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plants", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--wrong", action="store_true", help="tell each wrong verdict")
    parser.add_argument("--no-large", action="store_true", help="leave 1,024 GPUs out")
    args = parser.parse_args()
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.plants):
        fault = FAULTS[seed % len(FAULTS)]
        case = planted(seed)
        verdict = judge_pairs(case.evidence)
        total[fault] += 1
        if right(case, verdict.kind, verdict.culprits):
            good[fault] += 1
        elif args.wrong:
            print(f"seed {seed}: {case.story}\n  planted {case.kind} {case.culprits}\n  said    {verdict.kind} "
                  f"{verdict.culprits[:8]}: {verdict.reading[:150]}")  # fmt: skip
    clean = 0
    for seed in range(args.first, args.first + args.healthy):
        case = healthy(seed)
        verdict = judge_pairs(case.evidence)
        clean += verdict.kind == "none"
        if verdict.kind != "none" and args.wrong:
            print(f"healthy {seed}: {case.story}\n  said    {verdict.kind} {verdict.culprits[:8]}: {verdict.reading}")
    for fault in dict.fromkeys(FAULTS):
        if total[fault]:
            print(f"{fault:<14} {good[fault]:>4} of {total[fault]}")
    print(f"{'planted':<14} {sum(good.values()):>4} of {sum(total.values())} right")
    print(f"{'healthy':<14} {clean:>4} of {args.healthy} without a culprit")
    fine = sum(good.values()) >= 0.95 * sum(total.values()) and clean == args.healthy
    return 0 if (args.no_large or _large()) and fine else 1


def _large() -> bool:
    """1,024 GPUs, all pairs, one of them slow."""
    case = planted(0, "gpu slow", (128, 8))
    start, used = time.perf_counter(), time.process_time()
    verdict = judge_pairs(case.evidence)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"1,024 GPUs: {len(case.evidence['src']):,} pairs judged in {took:.1f} s ({time.process_time() - used:.1f} s "
        f"of CPU), peak {peak:,.0f} MiB with the evidence; {verdict.kind} {', '.join(verdict.culprits)}"
    )
    return took < 10 and right(case, verdict.kind, verdict.culprits)


if __name__ == "__main__":
    raise SystemExit(main())
