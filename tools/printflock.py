#!/usr/bin/env python
"""printflock: print from many processes at once, and no line is mixed with another.

    from printflock import printflock
    printflock(f"{dist.get_rank()}: my long debug message")

or in place of print, with nothing else to change:

    from printflock import printflock as print

The lines of ranks come in any order, unless all ranks call it with ordered=True. More: docs/ranks.md.
"""

import sys
from pathlib import Path

try:
    import mldebug  # noqa: F401
except ModuleNotFoundError:  # a checkout that is not installed
    sys.path.append(str(Path(__file__).resolve().parent.parent))

from mldebug.ranks import print_once, printflock, rank0_print

__all__ = ["print_once", "printflock", "rank0_print"]
