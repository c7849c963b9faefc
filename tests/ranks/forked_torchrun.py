"""torchrun whose ranks are forked of it, with torch loaded: each would spend two seconds of a core on the import.

    python tests/ranks/forked_torchrun.py -m torch.distributed.run --nproc-per-node 4 train.py

The words are those of Python; any program that becomes a launcher of torch takes the place of `-m ...`. A rank is what
it is without this: a child of the launcher, a session of its own, unbuffered, with its own words and environment in
/proc and the agent of `mldebug watch` where that asks for one. What it cannot tell: what it imports by itself.

One with a model of DistributedDataParallel has to drop that before it destroys the process group. The other order can
end in a deadlock of torch, and in a process that has more of torch loaded it mostly does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main(words: list[str]) -> None:
    """Fork the ranks before anything starts a thread, and be the launcher; a rank returns when it is to begin."""
    import torch.distributed.launcher.api  # noqa: F401

    from tests.with_torch import _become

    number = int(words[words.index("--nproc-per-node") + 1])
    gc.collect()
    gc.freeze()  # else each rank copies all of these objects when it looks for garbage, and at its end
    waiting: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for one in (ours, *(one for _, one in waiting)):
                one.close()
            _be_a_rank(theirs)
            return
        theirs.close()
        waiting.append((pid, ours))
    _give_ranks(waiting)
    try:
        _become(words)
    finally:
        for pid, ours in waiting:  # that the launcher did not come to start
            ours.close()
            os.waitpid(pid, 0)


def _give_ranks(waiting: list[tuple[int, socket.socket]]) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    class Rank(subprocess.Popen[bytes]):
        """One that waits is told what to be, where Popen would start a process."""

        def _execute_child(self, args: Any, *others: Any) -> None:
            env, streams = others[5], [others[at] for at in (9, 12, 14)]
            self.pid, link = waiting.pop(0)
            self._child_created = True
            with link:
                fds = [fd if given == -1 else given for fd, given in enumerate(streams)]
                socket.send_fds(link, [json.dumps([list(args), env]).encode()], fds)

    subprocess_handler.Popen = Rank


def _be_a_rank(link: socket.socket) -> None:
    from tests.with_torch import _become

    with link:
        data, fds, *_ = socket.recv_fds(link, 1 << 20, 3)
    if not data:
        os._exit(0)
    words, env = json.loads(data)
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    _show(words, env)
    del words[0]  # Python
    if words[0] == "-u":
        del words[0]
        for name, number in (("stdout", 1), ("stderr", 2)):
            raw = io.FileIO(number, "w", closefd=False)
            stream = io.TextIOWrapper(raw, "utf-8", errors=getattr(sys, name).errors, write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    exec((ROOT / "mldebug" / "hang" / "mldebug_agent.pth").read_text(encoding="utf-8"), {})
    _become(words)


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
