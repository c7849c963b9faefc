"""What a log says of the ends of ranks besides tracebacks: torchrun's summary, NCCL's watchdog, signals, OOM."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from mldebug.ranks import _logs_mpi
from mldebug.ranks._logs_source import Source

# Where none of these stands in a piece of the log, its lines need no second look.
MARKS = (
    b"Traceback", b"Watchdog caught", b"last enqueued", b"Fatal Python", b"egmentation fault", b"terminate called",
    b"Bus error", b"oom", b"OOM", b"Killed", b"exitcode", b"srun: error", b"CANCELLED", b"NCCL WARN", b"core dumped",
    b"exits with return code", b"SyntaxError", b"IndentationError", *_logs_mpi.MARKS,
)  # fmt: skip

_WATCHDOG = re.compile(rb"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_GROUP = re.compile(rb"\[PG (?:ID )?(\d+)")
_QUEUED = re.compile(rb"last enqueued(?: NCCL)? work: (-?\d+), last completed(?: NCCL)? work:")
_FAILED = re.compile(rb"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_FIELD = re.compile(rb" *(time|host|rank|exitcode) *: (.*)")
_EVENTS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (rb"Fatal Python error: ([^\n]{1,80})", "Fatal Python error: %s"),
        (rb"srun: error: (\S+: tasks? [\d,-]+: [^\n]{1,60})", "srun: %s"),
        (rb"^Killed$|: line \d+: +\d+ Killed ", "killed (SIGKILL: the OOM killer, or kill -9)"),
        (rb"[Ss]egmentation fault", "segmentation fault"),
        (rb"^((?:Syntax|Indentation)Error: [^\n]{1,120})", "%s"),
        (rb"Bus error", "bus error (a full /dev/shm is the usual reason)"),
        (rb"terminate called after throwing an instance of '([^']*)'", "C++ exception %s ended it"),
        (rb"oom[-_ ]kill|Out of memory: Killed|OOM Killed|OOMKilled", "killed for want of memory (OOM)"),
        (rb"CANCELLED AT \S+ (DUE TO [A-Z ]+)", "SLURM cancelled the job %s"),
        (rb"NCCL WARN ([^\n]{1,160})", "NCCL WARN %s"),
    )
)
_TASK = re.compile(r"srun: (\S+): task (\d+): (.*)")
_DEEPSPEED = re.compile(rb"(?:--local_rank=(\d+).*)?exits with return code = (-?\d+)")
_GRAVE = re.compile(r"\bOOM\b|Out Of Memory")
_LATE = re.compile(r"^srun: .*: (?:Terminated|Killed|Exited with exit code 143)")
_SIGNALS = {
    -9: "SIGKILL: the OOM killer, or kill -9",
    -11: "SIGSEGV",
    -6: "SIGABRT",
    -7: "SIGBUS: a full /dev/shm?",
    -15: "SIGTERM",
}


@dataclass
class Failure:
    """One rank in the summary that torchrun prints at the end, or a task of which srun says how it ended."""

    rank: int
    host: str = ""
    time: str = ""
    exitcode: int | None = None
    first: bool = False  # torchrun's "root cause": the failure that it saw first
    launcher: str = "torchrun"
    said: str = ""  # by srun

    @property
    def words(self) -> str:
        return self.said or f"exit code {_with_signal(self.exitcode)}"


def _with_signal(code: int | None) -> str:
    return f"{code} ({_SIGNALS[code]})" if code in _SIGNALS else str(code)


class Ends:
    """What was seen, with the ranks it was seen of; bounded."""

    def __init__(self) -> None:
        self.events: dict[str, int] = {}  # words -> mask of sources
        self.timeouts: dict[tuple[str, int], int] = {}  # (collective, number) -> mask
        self.enqueued: dict[tuple[int, str], int] = {}  # index of a source, process group -> last enqueued work
        self.failures: dict[int, Failure] = {}
        self.launcher_said = False
        self.mpi = _logs_mpi.Mpi()

    def look(self, text: bytes, source: Source) -> None:
        """One line that belongs to no traceback."""
        found = _WATCHDOG.search(text)
        if found:
            key = (found[2].decode(), int(found[1]))
            if key in self.timeouts or len(self.timeouts) < 64:
                self.timeouts[key] = self.timeouts.get(key, 0) | source.bit
        found = _QUEUED.search(text)
        if found:
            group = _GROUP.search(text)
            self.enqueued.setdefault((source.index, group[1].decode() if group else "0"), int(found[1]))
        found = _FAILED.search(text)
        if found:
            self.launcher_said = True
        if (end := self.mpi.look(text)) is not None:
            self._of_mpi(end, source)
        found = _DEEPSPEED.search(text)
        if found:
            who = f"local rank {int(found[1])}" if found[1] else "a rank"
            self._event(f"DeepSpeed: {who} exits with return code {_with_signal(int(found[2]))}", source)
        for pattern, words in _EVENTS:
            found = pattern.search(text)
            if found:
                self._event(words % found[1].decode("utf-8", "replace") if found.groups() else words, source)
                break

    def _of_mpi(self, end: _logs_mpi.MpiEnd, source: Source) -> None:
        if end.rank is None:
            pid = f" (PID {end.pid})" if end.pid else ""
            self._event(f"{end.launcher}: a process{pid}{f' on {end.host}' if end.host else ''}, {end.said}", source)
        elif len(self.failures) < 1024:
            first = not self.failures
            failure = Failure(end.rank, end.host, first=first, launcher=end.launcher, said=end.said)
            self.failures.setdefault(end.rank, failure)

    def _event(self, said: str, source: Source) -> None:
        if said in self.events or len(self.events) < 100:
            self.events[said] = self.events.get(said, 0) | source.bit

    def settle(self, ranks: Container[int]) -> None:
        """At the end: what is grave comes first; and where tasks of srun are ranks (`ranks` are those of which there
        are lines), and no torchrun has spoken, they are known failures."""
        order = sorted(self.events, key=lambda said: (bool(_LATE.match(said)), not _GRAVE.search(said)))
        self.events = {said: self.events[said] for said in order}
        if self.launcher_said:
            return
        for said in order:
            found = _TASK.match(said)
            if found and int(found[2]) in ranks and not _LATE.match(said):
                number = int(found[2])
                failure = Failure(number, found[1], first=not self.failures, launcher="srun", said=found[3])
                self.failures.setdefault(number, failure)

    def read_summary(self, lines: list[bytes]) -> None:
        """The block that torchrun prints with its ChildFailedError."""
        self.launcher_said = True
        root = False
        fields: dict[bytes, bytes] = {}
        for line in lines:
            if line.startswith(b"Root Cause"):
                root = True
            found = _FIELD.match(line)
            if not found:
                continue
            fields[found[1]] = found[2].strip()
            if found[1] == b"exitcode":
                self._failure(fields, root)
                fields = {}

    def _failure(self, fields: dict[bytes, bytes], root: bool) -> None:
        rank, code = re.match(rb"\d+", fields.get(b"rank", b"")), re.match(rb"-?\d+", fields.get(b"exitcode", b""))
        if rank is None:
            return
        number = int(rank[0])
        known = self.failures.get(number)
        if known is None:
            host, time = (fields.get(name, b"").decode("utf-8", "replace") for name in (b"host", b"time"))
            self.failures[number] = Failure(number, host, time.replace("_", " "), int(code[0]) if code else None, root)
        elif root:
            known.first = True
