"""`mldebug dist-test` with ranks that have a fault: DIST_FAULT says which, DIST_LIGHT=1 takes ranks without torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from mldebug import cli
from mldebug.cluster.dist import _node
from mldebug.core.world import world
from tests.forked import forks

if "--nproc" in sys.argv:
    subprocess.Popen = forks(int(sys.argv[sys.argv.index("--nproc") + 1]), os.environ.get("DIST_CASE", ""))
_node.WORKER = (sys.executable, str(Path(__file__).with_name("dist_rank.py")))
fault = json.loads(os.environ.get("DIST_FAULT", "{}"))
if fault.get("do") == "never" and world().rank in fault["ranks"]:
    time.sleep(fault.get("for", 60))
    sys.exit(1)
cli.COMMANDS.setdefault("dist-test", ("mldebug.cli._dist_test", "", "test ranks"))
sys.argv[1:1] = ["dist-test"]
sys.exit(cli.main())
