"""`mldebug comms` whose ranks may have faults: see comms_node.py."""

import os
import subprocess
import sys
from pathlib import Path

from mldebug.cli import main
from mldebug.cluster.collectives import _launch
from tests.forked import forks

NODE = str(Path(__file__).with_name("comms_node.py"))
_launch.PROGRAM = f"import runpy; runpy.run_path({NODE!r}, run_name='__main__')"

if __name__ == "__main__":
    subprocess.Popen = forks(1, os.environ.get("COMMS_CASE", "comms_node"))
    sys.exit(main(sys.argv[1:]))
