"""How often the verdict on a sample of 1,024 GPUs is right: what a dozen rounds can tell, and what they cannot.

    python tests/benchmarks/pairs_sampled.py [--plants 28] [--healthy 4] [--nodes 128] [--gpus 8] [--seconds 100]

Prints a line for each kind of fault, then the sum over the faults of GPUs and nodes, which a sample has to tell, and
over the others. Exits with 1 when fewer than 95% of the first are right or a healthy cluster has a culprit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mldebug.cluster.pairs._judge import judge_pairs
from tests.cluster.simulate import FAULTS, SAMPLED, build, measure, planted, right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plants", type=int, default=28)
    parser.add_argument("--healthy", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100.0, help="begin no other one after that")
    args = parser.parse_args()
    began = time.monotonic()
    good: Counter[str] = Counter()
    total: Counter[str] = Counter()
    kinds = [*SAMPLED, *(fault for fault in dict.fromkeys(FAULTS) if fault not in SAMPLED)]
    kinds = [fault for fault in kinds if fault not in ("all wrong", "node two", "node alone")]
    clean = many = 0
    for seed in range(args.healthy):
        cluster = build(np.random.default_rng((seed, 3)), args.nodes, args.gpus)
        clean += judge_pairs(measure(np.random.default_rng(seed), cluster, form="sample")).kind == "none"
        many += 1
    for seed in range(args.plants):
        if time.monotonic() - began > args.seconds:
            break
        fault = kinds[seed % len(kinds)]
        case = planted(seed, fault, (args.nodes, args.gpus), "sample")
        verdict = judge_pairs(case.evidence)
        total[fault] += 1
        good[fault] += right(case, verdict.kind, verdict.culprits)
    for fault in kinds:
        print(f"{fault:<14} {good[fault]:>4} of {total[fault]}")
    told = [sum(count[fault] for fault in kinds if fault in SAMPLED) for count in (good, total)]
    rest = [sum(count[fault] for fault in kinds if fault not in SAMPLED) for count in (good, total)]
    print(
        f"GPUs and nodes {told[0]} of {told[1]} right; others {rest[0]} of {rest[1]}; healthy {clean} of {many} clean"
    )
    return 0 if told[0] >= 0.95 * told[1] and clean == many else 1


if __name__ == "__main__":
    raise SystemExit(main())
