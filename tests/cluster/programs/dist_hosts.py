"""What `mldebug dist-test --hosts` starts on a host, with ranks that have a fault: see dist_rank.py."""

import sys
from pathlib import Path

from mldebug.cluster.dist import _hosts, _node

_node.WORKER = (sys.executable, str(Path(__file__).with_name("dist_rank.py")))
sys.exit(_hosts.main())
