#!/usr/bin/env python
"""Seconds of 1000 calls of all_gather_object against all_reduce of one number: the classic script's lines.

    torchrun --nproc_per_node 2 all_gather_object_vs_all_reduce.py

The same as `mldebug comms --objects`. See docs/comms.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.cluster.collectives._classic import objects_main

if __name__ == "__main__":
    sys.exit(objects_main("all_gather_object_vs_all_reduce", "all_reduce"))
