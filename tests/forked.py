"""Pythons that a program starts, forked of it with torch loaded: each would spend two seconds of a core on the import.

    python tests/forked.py -m torch.distributed.run --nproc-per-node 4 train.py

is torchrun whose ranks are forked. The words are those of Python; any program that becomes a launcher of torch takes
the place of `-m ...`. Another program begins with

    subprocess.Popen = forks(2)

One that is started is what it is without this: a child of the program, a session of its own where it is to have one,
with its own words, descriptors and environment (in /proc as well) and the agent of `mldebug watch` where that asks for
one. What it cannot tell: what it imports by itself.

One with a model of DistributedDataParallel has to drop that before it destroys the process group. The other order can
end in a deadlock of torch, and in a process that has more of torch loaded it mostly does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import inspect
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_HIGH = 100  # descriptors come here first, out of the way of those that they are to be


def main(words: list[str]) -> None:
    """Be the launcher, or one of the ranks."""
    import torch.distributed.launcher.api  # noqa: F401
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.with_torch import become

    subprocess_handler.Popen = forks(int(words[words.index("--nproc-per-node") + 1]))
    become(words)


def forks(number: int, name: str = "") -> Any:
    """A Popen whose first `number` Pythons are forked here and now, where torch is loaded, and wait for what they are
    to be: later this process may have threads. They are called `name` in /proc/PID/comm."""
    if "torch" not in sys.modules:
        return subprocess.Popen
    gc.collect()
    gc.freeze()  # else each copies all of these objects when it looks for garbage, and at its end
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for one in (ours, *(one for _, one in waiting)):
                one.close()
            _wait_and_be(theirs, name)
            sys.exit()
        theirs.close()
        waiting.append((pid, ours))
    atexit.register(_let_go, waiting)

    class Forked(subprocess.Popen[Any]):
        """One that waits is told what to be, where Popen would start a process."""

        def _execute_child(self, *given: Any, **more: Any) -> None:
            plain = super()._execute_child  # type: ignore[misc]
            told = inspect.signature(plain).bind(*given, **more).arguments
            if not waiting or told["args"][0] != sys.executable:
                plain(*given, **more)
                return
            self.pid, link = waiting.pop(0)
            self._child_created = True
            streams = [told["p2cread"], told["c2pwrite"], told["errwrite"]]
            passed = list(told["pass_fds"])
            env = dict(os.environ if told["env"] is None else told["env"])
            what = [list(told["args"]), env, [0, 1, 2, *passed], told["start_new_session"]]
            fds = [fd if given == -1 else given for fd, given in enumerate(streams)]
            with link:
                socket.send_fds(link, [json.dumps(what).encode()], [*fds, *passed])
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(told[name] for name in pipes))  # type: ignore[attr-defined]

    return Forked


def _let_go(waiting: list[tuple[int, socket.socket]]) -> None:
    """Those that the program did not come to start."""
    for pid, ours in waiting:
        ours.close()
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)


def _wait_and_be(link: socket.socket, name: str) -> None:
    from tests.with_torch import become

    with link:
        data, given, *_ = socket.recv_fds(link, 1 << 20, 16)
    if not data:
        os._exit(0)
    words, env, numbers, own_session = json.loads(data)
    if own_session:
        os.setsid()
    if name:
        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in given]
    for fd in given:
        os.close(fd)
    for fd, number in zip(high, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    _show(words, env)
    del words[0]  # Python
    if words[0] == "-u":
        del words[0]
        for stream, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            text = io.TextIOWrapper(raw, "utf-8", errors=getattr(sys, stream).errors, write_through=True)
            setattr(sys, stream, text)
            setattr(sys, f"__{stream}__", text)
    exec((ROOT / "mldebug" / "hang" / "mldebug_agent.pth").read_text(encoding="utf-8"), {})
    become(words)


def _show(words: list[str], env: dict[str, str]) -> None:
    """Let /proc tell of these words and this environment: it reads them where the kernel put those of the start. What
    does not fit is left out; what a launcher adds comes first."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, stat[45:49])
    line = "\0".join(words).encode() + b"\0"
    line = b"/" * (arg_end - arg_start - len(line)) + line  # the path of Python stays the same path
    if len(line) == arg_end - arg_start:
        ctypes.memmove(arg_start, line, len(line))
    text = b""
    before = dict(one.split("=", 1) for one in _environ() if "=" in one)
    for name in sorted(env, key=lambda name: before.get(name) == env[name]):
        one = os.fsencode(f"{name}={env[name]}") + b"\0"
        if len(text) + len(one) <= env_end - env_start:
            text += one
    ctypes.memmove(env_start, text.ljust(env_end - env_start, b"\0"), env_end - env_start)


def _environ() -> list[str]:
    with contextlib.suppress(OSError):
        return os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    return []


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1:])
