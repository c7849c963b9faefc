#!/usr/bin/env bash
# Bind the program after it to the CPUs and the memory of the NUMA node of its GPU. As the classic script is used:
#
#   torchrun --nproc_per_node=8 --no-python ./numa-set.sh python train.py
#   srun --ntasks-per-node 8 ./numa-set.sh ./my-program --its options
#
# CUDA_VISIBLE_DEVICES, cgroups and the present affinity are heeded, numactl and nvidia-smi are not needed, and where
# nothing near may be used the program runs as it would without this; stderr says why. PYTHON names the interpreter.
# More: docs/numa.md; `mldebug numa --split` also gives each rank cores of its own.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MLDEBUG_NUMA_TREE=$here

exec "${PYTHON:-python}" -c '
import os, sys

try:
    import mldebug
except ImportError:  # run from a clone, without an installation
    sys.path.insert(0, os.environ["MLDEBUG_NUMA_TREE"])
del os.environ["MLDEBUG_NUMA_TREE"]

from mldebug.core.errors import MldebugError
from mldebug.perf.numa._bind import bind_numa

if len(sys.argv) < 2:
    sys.exit("usage: numa-set.sh PROGRAM [ARGUMENTS]")
try:
    report = bind_numa(memory="bind", quiet=True)
    rank = os.environ.get("RANK", report.rank)
    print(f"Starting local rank {rank} on NUMA node {-1 if report.node is None else report.node}", flush=True)
    if not report.bound:
        print(report.text(), file=sys.stderr, flush=True)
except MldebugError as exc:
    print(f"numa-set.sh: {exc}", file=sys.stderr, flush=True)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as exc:
    sys.exit(f"numa-set.sh: cannot run {sys.argv[1]}: {(exc.strerror or str(exc)).lower()}")
' "$@"
