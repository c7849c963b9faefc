"""Starts the ranks of a test: torchrun in this process, which ends with the pytest that started it.

    python _launch.py FOLDER TORCHRUN_ARGUMENTS...

A program of its own. What torchrun says of ranks that failed goes into FOLDER/end.json.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys


def main(folder: str, words: list[str]) -> int:
    _end_with(int(os.environ["MLDEBUG_TESTING_PARENT"]))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(words))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = {rank: one.exitcode for rank, one in error.failures.items()}
        with open(os.path.join(folder, "end.json"), "w", encoding="utf-8") as stream:
            json.dump(failures, stream)
        return 1
    return 0


def _end_with(parent: int) -> None:
    """SIGTERM, at which torchrun ends its ranks, when `parent` dies in any way. Linux has this, others do not."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("pytest has ended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
