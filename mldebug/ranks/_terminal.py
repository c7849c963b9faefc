"""A terminal for pdb on any rank: the one the job was started from, or a socket to reach it by."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

from mldebug.ranks._world import Who, host


class Terminal:
    """What pdb reads and writes; None is what the program itself has as stdin and stdout."""

    def __init__(self, stdin: Any = None, stdout: Any = None) -> None:
        self.stdin, self.stdout = stdin, stdout

    def close(self) -> None:
        """Done with it, as the program goes on."""


def find_terminal(me: Who) -> Terminal:
    """The terminal that this process, or a launcher above it, has in the foreground; else a socket, which is said.

    torchrun's children read its stdin but are sessions of their own, so that /dev/tty is not theirs; those of
    multiprocessing have /dev/null. Of a job in the background the terminal is the shell's, and is left alone.
    """
    if "ipykernel" in sys.modules or (
        _is_open_tty(0, sys.stdin) and _is_open_tty(1, sys.stdout) and _in_foreground("/dev/fd/0")
    ):
        with contextlib.suppress(termios.error, OSError):
            termios.tcflush(0, termios.TCIFLUSH)  # what was typed before is not meant for pdb
        return Terminal()
    for path in _candidates():
        with contextlib.suppress(OSError):
            if _in_foreground(path):
                return FileTerminal(path)
    return SocketTerminal(me)


class FileTerminal(Terminal):
    """A terminal that is not the program's stdin and stdout: these go to a file or a pipe."""

    def __init__(self, path: str) -> None:
        reader = os.fdopen(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC), errors="replace")
        super().__init__(reader, _Writer(reader.fileno()))

    def close(self) -> None:
        self.stdin.close()


class _Writer:
    """Text to a descriptor, at once."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


class SocketTerminal(Terminal):
    """A Unix socket in a folder that only the user can enter. Who is cut off can come again: only `q` quits."""

    encoding = "utf-8"

    def __init__(self, me: Who) -> None:
        super().__init__(self, self)
        self._folder = tempfile.mkdtemp(prefix="mldebug-pdb-")
        self._path = os.path.join(self._folder, "socket")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self._path)
        self._server.listen(1)
        self._peer: socket.socket | None = None
        self._lines: Any = None
        srun = "srun --overlap --pty -w $(hostname) " if "SLURM_JOB_ID" in os.environ else ""
        srun = srun.replace("$(hostname)", host())
        print(
            f"mldebug: rank {me.rank} on {host()} (pid {os.getpid()}) is held in pdb, and has no terminal\n"
            f"hint: on {host()}: `{srun}nc -U {self._path}`, or, where nc is not: "
            f"`{srun}{sys.executable} -m mldebug.ranks._terminal {self._path}`",
            file=sys.stderr,
            flush=True,
        )

    def readline(self) -> str:
        while True:
            self._connect()
            with contextlib.suppress(OSError):
                if line := self._lines.readline():
                    return str(line)
            self._hang_up()
            self.write("(Pdb) ")  # for whoever comes next

    def write(self, text: str) -> int:
        self._connect()
        assert self._peer is not None
        with contextlib.suppress(OSError):  # whoever has gone is missed at the next line
            self._peer.sendall(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        self._hang_up()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self) -> None:
        if self._peer is None:
            self._peer = self._server.accept()[0]
            self._lines = self._peer.makefile("r", encoding="utf-8", errors="replace")

    def _hang_up(self) -> None:
        if self._peer is not None:
            self._lines.close()
            self._peer.close()
            self._peer = None


def _is_open_tty(descriptor: int, stream: Any) -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return bool(stream.fileno() == descriptor and os.isatty(descriptor))
    return False


def _candidates() -> list[str]:
    """Names of the terminals that this process and those above it have open."""
    found = []
    for pid in [os.getpid(), *_above(os.getpid())]:
        for descriptor in (0, 2, 1):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if name.startswith(("/dev/pts/", "/dev/tty", "/dev/console")) and name not in found:
                    found.append(name)
    return found


def _in_foreground(path: str) -> bool:
    """Whether the nearest process up from here that has this as its own terminal may read it now."""
    device = os.stat(path).st_rdev
    for pid in [os.getpid(), *_above(os.getpid())]:
        fields = _stat(pid)
        if len(fields) > 5 and int(fields[4]) == device:
            return fields[2] == fields[5]
    return os.isatty(0) and os.fstat(0).st_rdev == device  # nobody's, as in a container: ours


def _above(pid: int) -> list[int]:
    found: list[int] = []
    while len(fields := _stat(pid)) > 1 and int(fields[1]) > 0:
        pid = int(fields[1])
        found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def main(path: str) -> None:
    """Type into the socket at `path`, and show what comes back, until the other side closes.

    One loop and no thread: a thread that still reads stdin as the interpreter ends makes that a fatal error.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        waited_for: list[Any] = [peer, 0]
        while True:
            ready = select.select(waited_for, [], [])[0]
            if 0 in ready:
                typed = os.read(0, 65536)
                try:
                    peer.sendall(typed)
                    if not typed:
                        peer.shutdown(socket.SHUT_WR)
                except OSError:
                    typed = b""  # the other side has closed; what it said last is still to be read
                if not typed:
                    waited_for.remove(0)
            if peer in ready:
                said = b""
                with contextlib.suppress(ConnectionError):  # it closed and left something of ours unread
                    said = peer.recv(65536)
                if not said:
                    return
                sys.stdout.buffer.write(said)
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
