"""`python -m mldebug`, and `torchrun ... -m mldebug`: the command line."""

from __future__ import annotations

import sys

from mldebug.cli import main

if __name__ == "__main__":
    sys.exit(main())
