#!/usr/bin/env python
"""Test that all GPUs of a job can talk to each other and can hold memory, and name the one that cannot.

The classic script's command line, over `mldebug dist-test`:

    torchrun --nproc_per_node 2 --nnodes 1 torch-distributed-gpu-test.py
    python -m torch.distributed.run --nproc_per_node 4 --nnodes 1 torch-distributed-gpu-test.py
    srun --ntasks-per-node 8 python torch-distributed-gpu-test.py

Each rank verifies the contents of every collective; a hang is ended, and the rank that caused it is named, after 30
seconds without progress. Options of `mldebug dist-test` may follow: --backend gloo, --timeout 15, --json, -o FILE, -v.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import mldebug
except ImportError:  # run from a clone, without an installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import mldebug  # noqa: F401

from mldebug.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "dist-test")
    sys.exit(main())
