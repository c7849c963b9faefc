"""What looks after the workers of a live pair matrix, with faults: PAIRS_FAULTS is a list of {gpu, peer, do, once}."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from mldebug.cluster.pairs import _node, _worker

FAULTS = json.loads(json.loads(sys.argv[1])["env"].get("PAIRS_FAULTS") or os.environ.get("PAIRS_FAULTS", "[]"))
plain = _worker.Worker.measure
pattern = _worker._Link._pattern


def measure(worker: _worker.Worker, task: Any) -> None:
    own = task["gpus"][task["member"]]
    for fault in FAULTS:
        if own != fault["gpu"] or fault.get("peer") not in (None, *task["gpus"]):
            continue
        if "once" in fault:
            if Path(fault["once"]).exists():
                continue
            Path(fault["once"]).touch()
        if fault["do"] == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
        if fault["do"] == "hang":
            time.sleep(3600)
        if fault["do"] in ("stop", "kill"):
            os.kill(os.getpid(), signal.SIGSTOP if fault["do"] == "stop" else signal.SIGKILL)
    plain(worker, task)


def corrupted(link: Any, sender: int, turn: int) -> Any:
    """One wrong word of what is sent by a GPU that corrupts."""
    words = pattern(link, sender, turn)
    mine = sender == link.member and turn == 1
    if mine and any(fault["do"] == "corrupt" and fault["gpu"] == link.ids[link.member] for fault in FAULTS):
        words[-1] ^= 1
    return words


_worker.Worker.measure = measure  # type: ignore[assignment,method-assign]
_worker._Link._pattern = corrupted  # type: ignore[assignment,method-assign]
if __name__ == "__main__":
    sys.exit(_node.main())
