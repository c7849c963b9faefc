"""`mldebug pairs` whose workers may have faults: see pairs_node.py."""

import sys
from pathlib import Path

from mldebug.cli import main
from mldebug.cluster import _start
from mldebug.cluster.pairs import _live

NODE = str(Path(__file__).with_name("pairs_node.py"))
_live.PROGRAM = f"import runpy; runpy.run_path({NODE!r}, run_name='__main__')"
_start._PASSED = (*_start._PASSED, "PAIRS_FAULTS")

if __name__ == "__main__":
    sys.exit(main(["pairs", *sys.argv[1:]]))
