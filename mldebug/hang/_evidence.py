"""What `collect()` returns and `judge()` reads: plain JSON, one document for a whole job.

The evidences of several nodes merge by joining their lists (`merge_evidence`), so a cluster, a recorded job and a
simulated one take the same path. What could not be read is left out and has a reason (`status`, `why`); keys that are
marked NotRequired may be missing, and the judge then says less.

Times are seconds since the epoch, `ticks` are clock ticks of CPU time (user and system) since the start of the process
or thread, frames are innermost first, as py-spy gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

SCHEMA = 1
# A note of evidence that was taken with all local variables.
ALL_LOCALS = "all local variables are in this evidence and are shown: they may hold private data"


class Local(TypedDict):
    name: str
    repr: str  # as py-spy shows it: "3", "<ProcessGroup at 0x7f..>", "[<ProcessGroup at 0x7f..>, ...]"
    arg: bool


class Frame(TypedDict):
    name: str  # the function, with its class where Python knows it
    file: str  # full path
    line: int
    locals: NotRequired[list[Local]]  # integers, strings and group objects are always read


class Thread(TypedDict):
    name: str
    tid: int  # the thread's id in the operating system
    active: bool  # py-spy: not idle
    gil: bool  # py-spy: owns the GIL
    frames: list[Frame]
    ticks: NotRequired[int]
    switches: NotRequired[int]  # how often it gave up its core to wait
    io: NotRequired[int]  # bytes read and written, sockets left aside


class Sample(TypedDict):
    """One look at one process."""

    time: float
    state: str  # of the process: R S D T t Z X
    ticks: int
    threads: list[Thread]
    wchan: NotRequired[str]
    woke: NotRequired[list[int]]  # of the main thread: `switches` before and after the look
    io: NotRequired[list[int]]  # of the main thread: `io` before and after the look


class Lock(TypedDict):
    """A line of /proc/locks about a process of the job."""

    pid: int
    kind: str  # FLOCK or POSIX
    inode: str  # "08:01:1234": what holder and waiters share
    waits: bool  # wants the lock ("->" in /proc/locks) and does not hold it
    file: NotRequired[str]


class Child(TypedDict):
    """A process under a rank that is no rank itself: a DataLoader worker, a tool, a zombie."""

    pid: int
    parent: int
    command: str
    kind: str  # "dataloader", "multiprocessing", "python", "other"
    state: str
    samples: list[Sample]
    why: NotRequired[str]  # there is no stack, because
    pipes: NotRequired[list[Pipe]]


class Pipe(TypedDict):
    """An open end of a pipe: who shares `inode` is at its other end."""

    fd: int
    inode: str
    write: bool


class Call(TypedDict):
    """One operation of the record of collectives, as the rank issued it."""

    group: str  # the name of the group, the same on all ranks ("0" is the default group)
    seq: int  # counted in the group, from 1; point-to-point calls count on their own
    op: str  # "all_reduce", "broadcast", "send 0->1"
    done: bool
    sizes: NotRequired[list[list[int]]]
    frames: NotRequired[list[Frame]]
    p2p: NotRequired[bool]


class Record(TypedDict):
    """The flight record of a rank, from the agent or from NCCL."""

    calls: list[Call]  # oldest first
    whole: bool  # reaches back to the first call
    groups: NotRequired[dict[str, GroupInfo]]


class GroupInfo(TypedDict):
    desc: str
    ranks: list[int]  # global ranks; empty means all


class Communicator(TypedDict):
    """A communicator of NCCL, as NCCL's own RAS sees it from outside of the job."""

    name: str  # its hash, the same on all ranks
    size: int
    rank: int  # in the communicator
    status: str  # starting, running, ending, aborted, error, left
    issued: NotRequired[list[dict[str, int]]]  # at each look: operations issued so far, {"AllReduce": 12}


class Gpu(TypedDict):
    index: int
    busy: list[int]  # at each look, in percent: a kernel that waits for other ranks counts as work


class Progress(TypedDict):
    """What the agent keeps in shared memory; read twice, a moving heartbeat says that the GIL is free."""

    step: NotRequired[list[int]]  # one value per sample: mark(step)
    heartbeat: NotRequired[list[int]]


class Rank(TypedDict):
    """One process of the job. `rank` is None where nothing tells it: it is then shown by its pid."""

    rank: int | None
    local_rank: int | None
    world_size: int | None
    local_world_size: NotRequired[int]  # ranks that its launcher started on this node
    pid: int
    host: str
    start: float
    job: str  # what ranks of one job share: TORCHELASTIC_RUN_ID, SLURM_JOB_ID or MASTER_ADDR:MASTER_PORT
    command: str
    user: NotRequired[str]  # whose process it is
    status: str  # ok, no-permission, gone, not-python, timeout
    why: NotRequired[str]  # where the status is not ok: the reason and the exact fix
    state: str  # as in the last sample
    samples: list[Sample]
    children: list[Child]
    locks: list[Lock]
    pipes: NotRequired[list[Pipe]]
    native: NotRequired[list[Thread]]  # py-spy --native, of outliers
    record: NotRequired[Record]
    progress: NotRequired[Progress]
    nccl: NotRequired[list[Communicator]]
    gpus: NotRequired[list[Gpu]]


class Host(TypedDict):
    host: str
    status: str  # ok, unreachable, timeout, failed
    why: NotRequired[str]


class Step(TypedDict):
    line: int
    what: str  # "call dist.barrier", "break", "continue", "return", "raise"; "statement" under a condition
    guards: list[str]


class Source(TypedDict):
    """What the text of the program says about a line that a frame stands on."""

    text: str  # the line itself, stripped
    guards: list[str]  # what is around it in its function, outermost first: "if rank == 0", "for step in range(9)"
    steps: list[Step]  # the calls and jumps of that function, in the order of the text


class Evidence(TypedDict):
    schema: int
    time: float
    hosts: list[Host]
    ranks: list[Rank]  # rank order, those without one last
    notes: list[str]
    source: NotRequired[dict[str, Source]]  # "file:line" -> Source


def merge_evidence(parts: Iterable[Evidence]) -> Evidence:
    """The evidences of several nodes as one; a process that is in several is there once, as the last has it.

    evidence = merge_evidence([collect(), json.load(open("node2.json"))])
    """
    merged: Evidence = {"schema": SCHEMA, "time": 0.0, "hosts": [], "ranks": [], "notes": [], "source": {}}
    ranks: dict[tuple[str, int, float], Rank] = {}
    hosts: dict[tuple[str, str], Host] = {}
    for part in parts:
        merged["time"] = max(merged["time"], part["time"])
        for host in part["hosts"]:
            hosts[(host["host"], host["status"])] = host
        for rank in part["ranks"]:  # the same file twice, or a node that was asked again: its later look
            ranks[(rank["host"], rank["pid"], rank["start"])] = rank
        merged["notes"] += [note for note in part["notes"] if note not in merged["notes"]]
        merged["source"].update(part.get("source", {}))
    merged["hosts"] = list(hosts.values())
    merged["ranks"] = sorted(ranks.values(), key=_order)
    return merged


def _order(rank: Rank) -> tuple[bool, int, str, int]:
    return rank["rank"] is None, rank["rank"] or 0, rank["host"], rank["pid"]


def is_evidence(document: Any) -> bool:
    """Whether a JSON document is evidence of the layout that this version reads."""
    return isinstance(document, dict) and document.get("schema") == SCHEMA and isinstance(document.get("ranks"), list)
