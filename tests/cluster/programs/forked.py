"""What a program under test starts is forked of it, where it has torch loaded (`run_torch`): each would spend two
seconds of a core on the import.

Those that are started are forked before the program begins, while it has one thread, and wait for what they are to be.
Each is a child of the program, with the words, variables and descriptors that it is given. What it cannot tell: what it
imports by itself, and how it starts. It has the name that it is given here in /proc/PID/comm.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.with_torch import _become as become

_HIGH = 100  # descriptors that are given come here first, out of the way of those that they are to be


def forks(number: int, name: str) -> None:
    """The next `number` Pythons that this program starts are forked of it, where it has torch."""
    if "torch" not in sys.modules:
        return
    gc.collect()
    gc.freeze()  # else each copies all of these objects when it looks for garbage
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for one in (ours, *(one for _, one in waiting)):
                one.close()
            _wait_and_be(theirs, name)
        theirs.close()
        waiting.append((pid, ours))

    class Forked(subprocess.Popen[Any]):
        def _execute_child(self, args: Any, *others: Any) -> None:
            if not waiting or args[0] != sys.executable:
                super()._execute_child(args, *others)  # type: ignore[misc]
                return
            passed, env = others[3], others[5]
            streams = [others[at] for at in (9, 12, 14)]
            fds = [fd if given == -1 else given for fd, given in enumerate(streams)]
            self.pid, link = waiting.pop(0)
            self._child_created = True
            with link:
                told = [list(args[1:]), dict(os.environ if env is None else env), list(passed)]
                socket.send_fds(link, [json.dumps(told).encode()], [*fds, *passed])
            self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]

    subprocess.Popen = Forked  # type: ignore[misc]


def _wait_and_be(link: socket.socket, name: str) -> None:
    """To the end of the process: the program that is asked for, or nothing where the other end is closed before."""
    status = 1
    try:
        with link:
            data, fds, *_ = socket.recv_fds(link, 1 << 20, 16)
        if data:
            words, env, passed = json.loads(data)
            ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
            for number, fd in zip(
                (0, 1, 2, *passed), [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds], strict=True
            ):
                os.dup2(fd, number)
                os.close(fd)
            for fd in set(fds) - set(passed):
                os.close(fd)
            os.environ.clear()
            os.environ.update(env)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            become(words)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
