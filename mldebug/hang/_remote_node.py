"""The far end: looks at the ranks of the node it runs on, and answers in lines of text. It ends itself in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from mldebug.core.errors import MldebugError
from mldebug.hang._remote_frames import pack
from mldebug.hang._remote_request import Request, asked_in
from mldebug.hang._remote_wire import WIRE, encode


def serve(word: str) -> int:
    """Answer a request on stdout; the exit status says only whether there was an answer."""
    request = asked_in(word)
    began = time.monotonic()
    name = request["name"] or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    _end_in_time(request["seconds"])
    with _only_ours() as stream:
        lock = threading.Lock()

        def say(line: bytes) -> None:
            with lock:
                stream.write(line)
                stream.flush()

        thread = None
        if "below" in request:
            from mldebug.hang._remote_ways import pass_on  # only where there are nodes below

            thread = threading.Thread(target=pass_on, args=(request, began, say))
            thread.start()
        for line in pack(name, _answer(request, began)):
            say(line)
        if thread is not None:
            thread.join()
    return 0


def _answer(request: Request, began: float) -> dict[str, Any]:
    from mldebug import hang

    options = dict(request["options"])
    left = request["seconds"] - (time.monotonic() - began)
    # Native stacks are read when all else has been, and may take as long again.
    options["timeout"] = max(0.5, (left - 1.0) / (2 if options.get("native") else 1))
    try:
        if request["slurm"]:
            options["pids"] = _of_job(os.environ.get("SLURM_JOB_ID", ""))
        nothing = request["slurm"] and not options["pids"]
        evidence = _nothing() if nothing else hang.collect(**options)
        hang.annotate(evidence)
        return encode(evidence, request["calls"])
    except MldebugError as exc:
        return {"wire": WIRE, "error": exc.message, "hint": exc.hint}


def _nothing() -> Any:
    host = {"host": socket.gethostname(), "status": "ok"}
    return {"schema": 1, "time": time.time(), "hosts": [host], "ranks": [], "notes": [], "source": {}}


def _of_job(job: str) -> tuple[int, ...]:
    """The processes here of a SLURM job, but for this one and those that it runs in."""
    from mldebug.hang._find import processes

    everything = processes()
    own, pid = set(), os.getpid()
    while pid in everything and pid not in own:
        own.add(pid)
        pid = everything[pid].parent
    found = {pid for pid, one in everything.items() if one.env.get("SLURM_JOB_ID") == job != "" and pid not in own}
    return tuple(sorted(pid for pid in found if everything[pid].parent not in found))


def _end_in_time(seconds: float) -> None:
    """End this process and what it started when nobody waits any more: an ssh client that is killed does not do it."""
    with contextlib.suppress(OSError):
        os.setpgrp()
    ours = os.getpgrp() == os.getpid()

    def end() -> None:
        time.sleep(seconds)
        if ours:
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


@contextlib.contextmanager
def _only_ours() -> Iterator[Any]:
    """The real stdout; what anything else writes to stdout goes to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as stream:
        os.dup2(2, 1)
        yield stream
