#!/usr/bin/env python
"""printflock: print from many processes at once, and no line is mixed.

    from printflock import printflock
    printflock(f"{dist.get_rank()}: my long debug message")

or in place of print, with nothing else to change:

    from printflock import printflock as print

The lines of ranks come in any order, unless all ranks call it with
ordered=True. More: docs/ranks.md.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # of a clone that is not installed

from mldebug.ranks import print_once, printflock, rank0_print

__all__ = ["print_once", "printflock", "rank0_print"]

if __name__ == "__main__":
    print(__doc__)
