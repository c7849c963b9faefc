"""Programs that need torch, by a process that has loaded it: each is forked from there, where a fresh Python spends two
seconds of a core on the import. The tests start hundreds of them.

What such a program cannot tell: what it imports by itself, and how it starts. Those use `run_python`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# What Python and the libraries below torch read when they are loaded.
_EARLY = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH_", "PYTORCH_", "LD_", "PYTHON")
_ANY = ("PYTHONPATH", "PYTHONFAULTHANDLER")


class WithTorch:
    """The process that has loaded torch, from the first run until the end.

    with WithTorch() as python:
        done = python.run(["-m", "mldebug", "--help"], timeout=60, env=dict(os.environ))
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WithTorch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait(60)

    def run(
        self,
        words: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str],
        cwd: str | Path | None = None,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does with these words behind `python`; TimeoutError says where one stands that is late."""
        early = [name for name in {*env, *os.environ} if name.startswith(_EARLY) and name not in _ANY]
        if other := [name for name in early if env.get(name) != os.environ.get(name)]:
            raise ValueError(f"{other} are read when torch is loaded: use run_python")
        request = {"words": list(words), "env": dict(env), "cwd": os.fspath(cwd or os.getcwd())}
        pipes = [os.pipe() for _ in range(4)]  # its stdin, stdout and stderr, and what we are told of it
        ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]
        theirs = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
        try:
            with self._lock:
                if self._process is None:
                    self._start()
                socket.send_fds(self._socket, [json.dumps(request).encode()], theirs)
        finally:
            for one in theirs:
                os.close(one)
        texts = [b"", b"", b""]
        readers = [threading.Thread(target=_read, args=(ours[at + 1], texts, at), daemon=True) for at in range(3)]
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError), os.fdopen(ours[0], "w") as stdin:
            stdin.write(input or "")
        deadline = time.monotonic() + timeout
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if any(reader.is_alive() for reader in readers):
            raise TimeoutError(self._end(words, timeout, readers, texts))
        pid_and_status = texts[2].split()
        out, err = (one.decode(errors="replace") for one in texts[:2])
        return subprocess.CompletedProcess([sys.executable, *words], int(pid_and_status[1]), out, err)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["WITH_TORCH_ROOM"] = "-" * 8192  # where the programs show their own variables: see forked.py
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _end(
        self, words: Sequence[str], timeout: float, readers: Sequence[threading.Thread], texts: Sequence[bytes]
    ) -> str:
        from mldebug.testing._processes import stacks_of

        stacks = ""
        if texts[2]:
            pid = int(texts[2].split()[0])
            stacks = stacks_of([pid])
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for reader in readers:
            reader.join(10)
        out, err = (one.decode(errors="replace") for one in texts[:2])
        return f"{words} did not end in {timeout:g} s\n--- stacks\n{stacks}\n--- stdout\n{out}\n--- stderr\n{err}"


def _read(fd: int, texts: list[bytes], at: int) -> None:
    with os.fdopen(fd, "rb", buffering=0) as stream:
        while data := stream.read(65536):
            texts[at] += data


def _serve(requests: socket.socket) -> None:
    """Fork a program for each request, until there can be no more of them. Returns where a program has run."""
    import torch
    import torch._dynamo  # noqa: F401  # the recorder needs it

    gc.collect()
    gc.freeze()  # else each program copies all of these objects when it looks for garbage, and at its end
    ended, wake = os.pipe()  # a byte for each SIGCHLD
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told: dict[int, int] = {}  # program -> where its status goes
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _bury(told)
        if requests in ready:
            data, fds, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (ended, wake, fds[3], *told.values()):
                    os.close(fd)
                requests.close()
                _begin(json.loads(data), fds[:3])
                return
            for fd in fds[:3]:
                os.close(fd)
            os.write(fds[3], f"{pid} ".encode())
            told[pid] = fds[3]


def _bury(told: dict[int, int]) -> None:
    for pid in list(told):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            fd = told.pop(pid)
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)


def _begin(request: dict[str, Any], fds: list[int]) -> None:
    """Be the program that is asked for."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    become(request["words"])


def become(words: list[str]) -> None:
    """Run the program as Python does with these words."""
    head, *args = words
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.path.dirname(os.path.realpath(head)) if not head.startswith("-") else os.getcwd() if head == "-m" else ""
    sys.path[:1] = [first, *paths]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if head == "-m":
        sys.argv = args
        runpy._run_module_as_main(args[0])  # type: ignore[attr-defined]
    elif head == "-c":
        sys.argv = ["-c", *args[1:]]
        exec(compile(args[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.argv = words
        main.__dict__["__file__"] = os.path.abspath(head)
        source = Path(head).read_bytes()
        exec(compile(source, head, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
