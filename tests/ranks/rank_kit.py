"""What the tests of ranks share: torchrun, ranks without a launcher, and a terminal to type into."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
FORKED = ROOT / "tests" / "forked.py"
_LAUNCHERS = ("SLURM", "OMPI_", "PMI", "PALS_", "MPI_", "TORCHELASTIC", "MASTER_", "GROUP_", "ROLE_")


def clean(**more: str) -> dict[str, str]:
    """An environment of no launcher, for a program of ours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") and not name.startswith(_LAUNCHERS)
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(*args: str | Path, ranks: int = 4) -> list[str]:
    options = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, args)]


def forked(command: Sequence[str]) -> list[str]:
    """This torchrun with its ranks forked of it."""
    return [command[0], str(FORKED), *command[1:]]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(arguments: Sequence[str | Path], environments: Sequence[dict[str, str]]) -> list[subprocess.Popen[str]]:
    """A Python process for each of these environments, as a launcher would start them."""
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=clean(**environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for environment in environments
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = 60) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each; those that do not end in time are killed, which their status shows."""
    end = time.monotonic() + timeout
    found = []
    for one in processes:
        try:
            out, err = one.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.pid, signal.SIGKILL)
            out, err = one.communicate()
        found.append((one.returncode, out, err))
    return found


class Typist:
    """A program in a terminal of its own, in its foreground, as from a shell."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], list(command), clean(TERM="dumb", **environment))
        self.text, self._seen = "", 0
        self.status: int | None = None

    def expect(self, pattern: str, timeout: float = 40, *, anywhere: bool = False) -> re.Match[str]:
        """Read on until the pattern comes in what has not been matched yet, or anywhere."""
        end = time.monotonic() + timeout
        start = 0 if anywhere else self._seen
        while not (match := re.compile(pattern, re.S).search(self.text, start)):
            if time.monotonic() > end or not self._read(end - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not come:\n{self.text}")
        self._seen = max(self._seen, match.end())
        return match

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at a prompt. Python misses one that comes after the prompt is written and before it waits."""
        for _ in range(20):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                self.expect("KeyboardInterrupt", timeout=2)
                return
        raise AssertionError(f"Ctrl-C was not heard:\n{self.text}")

    def end(self, timeout: float = 60) -> int:
        """Read to the end; the status of the program."""
        end = time.monotonic() + timeout
        while self._read(end - time.monotonic()):
            pass
        if time.monotonic() > end:
            os.killpg(self.pid, signal.SIGKILL)
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def _read(self, timeout: float) -> bool:
        if not select.select([self._fd], [], [], max(0.0, timeout))[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
            data = os.read(self._fd, 65536)
        self.text += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Typist:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            for one in below(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        os.close(self._fd)


def below(pid: int) -> Iterator[int]:
    """A process and all that it has started, ranks of torchrun included."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    todo = [pid]
    while todo:
        one = todo.pop()
        yield one
        todo += children.get(one, [])
