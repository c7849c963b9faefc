"""The collector as a process of its own, beside rank 0 of a job that torchrun, srun or mpirun started."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from mldebug.cluster.dist._collector import Collector, Config
from mldebug.cluster.dist._report import make_report, read_report
from mldebug.cluster.dist._wire import Gone, Wire, connects, listen
from mldebug.core.report import emit


def main() -> int:
    """Reads what it is to do from stdin; shows the report itself where rank 0 cannot any more."""
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, whose end is noticed here
    config = Config.from_dict(told["config"])
    if len(told["ports"]) > 1 and _is_there(told["ports"], config.job):
        return 0  # two ranks 0 of one job: the other one's collector will say so
    collector = Collector(config, listen(told["ports"]), lambda evidence: make_report(evidence).to_dict())
    collector.evidence["plan"] = told["plan"]
    # mpirun ends all ranks as soon as one of them has failed, before it could be told who: it is said at once then.
    # After its SIGTERM there is no time any more, and a second before that comes a SIGCONT.
    signal.signal(signal.SIGTERM, lambda *_: collector.terminate())
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        signal.signal(signal.SIGCONT, lambda *_: collector.continued())
    report = collector.run()
    # Without rank 0 there is nothing to say here: it went to another collector, or left with an error of its own.
    if not collector.shown and "0" in collector.ranks and told["output"] is not None:
        emit(read_report(report, told["verbose"]), **told["output"])
    return 0


def _is_there(ports: list[int], job: str) -> bool:
    for sock in connects([("127.0.0.1", port) for port in ports], 1.0).values():
        if not isinstance(sock, str):
            wire = Wire(sock)
            try:
                wire.send({"t": "whose", "job": job})
                if any(answer.get("mine") for answer in wire.wait(time.monotonic() + 0.5)):
                    return True
            except Gone:
                continue
            finally:
                wire.close()
    return False


if __name__ == "__main__":
    sys.exit(main())
