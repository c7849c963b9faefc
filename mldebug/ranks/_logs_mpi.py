"""What mpirun (Open MPI), prterun and MPICH's hydra say of the process that ended first; mostly several lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

MARKS = (b"noticed that process rank", b"detected that one or more", b"BAD TERMINATION")
_LINES = 20  # that such a message may have

_NOTICED = re.compile(rb"(mpirun|mpiexec|prterun) noticed that process rank (\d+) with PID \d+ on node (\S+) exited on"
                      rb"(?: (signal \d+(?: \([^)]*\))?))?")  # fmt: skip
_SIGNAL = re.compile(rb"(?:on )?(signal \d+(?: \([^)]*\))?)")
_DETECTED = re.compile(rb"(mpirun|mpiexec|prterun) detected that one or more processes exited")
_NAME = re.compile(rb"\s*Process name: \[.*[,@]\s*(\d+)\]\s*$")
_CODE = re.compile(rb"\s*Exit code: +(-?\d+)")
_BAD = re.compile(rb"= +(?:BAD TERMINATION OF|(?:RANK (\d+) )?PID (\d+) RUNNING AT (\S+))")
_BAD_END = re.compile(rb"= +(?:EXIT CODE: (\d+)|KILLED BY SIGNAL: (\d+(?: \([^)]*\))?))")


@dataclass(frozen=True)
class MpiEnd:
    """How one process ended. `rank` is None where only its pid is told."""

    launcher: str
    rank: int | None
    pid: int | None
    host: str
    said: str


class Mpi:
    """Gathers the lines of one such message."""

    def __init__(self) -> None:
        self._launcher = ""
        self._rank: int | None = None
        self._pid: int | None = None
        self._host = ""
        self.pending = 0  # lines in which the rest of a message is awaited

    def look(self, text: bytes) -> MpiEnd | None:
        """The next line; what it told once the reason is known."""
        self.pending = max(0, self.pending - 1)
        if found := _NOTICED.search(text):
            self._begin(found[1].decode(), int(found[2]), None, found[3])
            return self._end(found[4].decode()) if found[4] else None
        if found := _DETECTED.search(text):
            self._begin(found[1].decode(), None, None, b"")
        elif found := _BAD.match(text):
            self._begin("MPICH", int(found[1]) if found[1] else None, int(found[2] or 0) or None, found[3] or b"")
        elif self._launcher == "MPICH":
            if found := _BAD_END.match(text):
                return self._end(f"signal {found[2].decode()}" if found[2] else f"exit code {int(found[1])}")
        elif self._launcher:
            return self._goes_on(text)
        return None

    def _goes_on(self, text: bytes) -> MpiEnd | None:
        if found := _NAME.match(text):
            self._rank = int(found[1])
        elif found := _CODE.match(text):
            return self._end(f"exit code {int(found[1])}")
        elif self._rank is not None and (found := _SIGNAL.match(text)):
            return self._end(found[1].decode())
        return None

    def _begin(self, launcher: str, rank: int | None, pid: int | None, host: bytes) -> None:
        self.pending = _LINES
        self._launcher, self._rank, self._pid, self._host = launcher, rank, pid, host.decode("utf-8", "replace")

    def _end(self, said: str) -> MpiEnd:
        end = MpiEnd(self._launcher, self._rank, self._pid, self._host, said)
        self._launcher, self.pending = "", 0
        return end
