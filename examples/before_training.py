"""Before a run that takes days: is this machine fit, and do all ranks work together?

    python examples/before_training.py

It prints:

    node7: 0 bad, 1 to look at, 14 ok, 1 not visible
    dist-test: all is well: 2 ranks, gloo, 122 checks in 1.8 s
      node7: ranks 0-1: fine; cpu, torch 2.13.0+cpu
    training begins
"""

import sys

import mldebug

if __name__ == "__main__":  # dist_test starts ranks of its own, which are new processes
    machine = mldebug.doctor()  # also hosts="node[001-512]"; under srun each node looks at itself
    print(machine.text().splitlines()[0])  # all of it has the reasons and the hints

    ranks = mldebug.dist_test(nproc=2, backend="gloo", timeout=60)  # for GPUs leave both out
    print(ranks.text())
    if not ranks.ok:
        sys.exit(1)  # before hours of NCCL timeouts
    print("training begins")
