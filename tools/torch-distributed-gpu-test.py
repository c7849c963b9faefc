#!/usr/bin/env python
"""Test that all GPUs of a job can talk to each other and can hold memory, and
name the one that cannot.

The classic script's command line, over `mldebug dist-test`:

    torchrun --nproc_per_node 2 --nnodes 1 torch-distributed-gpu-test.py
    srun --ntasks-per-node 8 python torch-distributed-gpu-test.py

Each rank verifies the contents of every collective; a hang is ended, and the
rank that caused it is named, after 30 seconds without progress. Options of
`mldebug dist-test` may follow: --backend gloo, --timeout 15, --json, -o FILE.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cli import _dist_test as command
from mldebug.cli._parser import Parser
from mldebug.cli._tool import run_tool

VERSIONS = {"pt": "torch", "cuda": "cuda", "nccl": "nccl"}


def classic(report: Any) -> str:
    """A line for each rank that was heard of, fine or broken, and the versions."""
    lines, broken = [], {one.rank for one in report.culprits}
    ranks = [one for _, one in sorted(report.evidence["ranks"].items(), key=lambda item: int(item[0]))]
    for one in ranks:
        told = f"is OK (global rank: {one['rank']}/{report.world})"
        if one["rank"] in broken or not one["done"]:
            told = "is broken (but it could also mean that it failed because another gpu didn't respond)"
        lines.append(f"[{one['host']}:{one['local_rank']}] {told}\n")
    facts: dict[str, str] = ranks[0]["facts"] if ranks else {}
    versions = ", ".join(f"{name}={facts.get(key) or None}" for name, key in VERSIONS.items())
    return "".join([*lines, f"{versions}\n"])


if __name__ == "__main__":
    parser = Parser(prog="torch-distributed-gpu-test.py", description=__doc__)
    command.add_arguments(parser)
    run_tool("torch-distributed-gpu-test", lambda: command.run(parser.parse_args(), classic))
