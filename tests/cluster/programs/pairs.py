"""`mldebug pairs` whose workers may have faults: see pairs_node.py."""

import os
import subprocess
import sys
from pathlib import Path

from mldebug.cli import main
from mldebug.cluster import _start
from mldebug.cluster.pairs import _live
from tests.forked import forks

NODE = str(Path(__file__).with_name("pairs_node.py"))
_live.PROGRAM = f"import runpy; runpy.run_path({NODE!r}, run_name='__main__')"
_start._PASSED = (*_start._PASSED, "PAIRS_FAULTS", "PAIRS_CASE")

if __name__ == "__main__":
    subprocess.Popen = forks(1, os.environ.get("PAIRS_CASE", "pairs_node"))
    if "PAIRS_PID" in os.environ:
        Path(os.environ["PAIRS_PID"]).write_text(str(os.getpid()))
    sys.exit(main(["pairs", *sys.argv[1:]]))
