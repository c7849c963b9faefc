"""The ranks of this node and what belongs to them, from /proc alone."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from mldebug.core.errors import MldebugError, UsageError
from mldebug.hang._page import ENVIRONMENT


@dataclass
class Process:
    """One process as /proc shows it. `env` holds only the variables that say who it is in a job."""

    pid: int
    parent: int
    state: str
    start: float
    uid: int
    command: tuple[str, ...]
    env: dict[str, str]

    @property
    def line(self) -> str:
        return " ".join(self.command)[:300]


@dataclass
class Found:
    """A rank, by the process that runs its program, and the processes below it that are no ranks."""

    process: Process
    rank: int | None
    local_rank: int | None
    world_size: int | None
    job: str
    children: list[Process] = field(default_factory=list)

    @property
    def local_world_size(self) -> int | None:
        """How many ranks the launcher started on this node, where it says so and their numbers are torchrun's."""
        text = self.process.env.get("LOCAL_WORLD_SIZE", "")
        return int(text) if text.isdecimal() and self.process.env.get("RANK") else None


# The launcher that started a process, innermost first: rank, local rank and world size. A process that has numbers of
# an outer launcher only, while processes below it have those of an inner one, is that inner launcher.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
_JOB = (
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PALS_APID",
)  # fmt: skip
_KEPT = {name for names in _LAUNCHERS for name in names} | {*_JOB, ENVIRONMENT, "LOCAL_WORLD_SIZE"}


from_inside = False  # whether a rank started this process to look at it: what is above us is then no tool of ours
WATCHDOG = "mldebug.hang._watchdog_look"


def find_ranks(
    pids: Sequence[int] = (), name: str | None = None, user: str | None = None
) -> tuple[list[Found], list[str]]:
    """The ranks of one job on this node, in rank order, and notes on what was left aside.

    `pids` are ranks or processes above them; `name` is part of a command line; `user` is whose processes are looked at
    (default: the own ones). Of several jobs the one with most ranks is taken, of equal ones the newest.
    """
    everything = processes(pids)
    uid, own = _uid(user), _own()
    for pid in pids:
        if pid not in everything:
            raise UsageError(f"there is no process {pid}", "`ps -ef` shows what runs")
    mine = {pid: one for pid, one in everything.items() if pid in pids or (one.uid == uid and pid not in own)}
    below = children_of(everything)
    if pids:
        allowed = {pid for top in pids for pid in (top, *descendants(top, below))}
        mine = {pid: one for pid, one in everything.items() if pid in allowed and pid not in own}
    ranks = _numbered(mine, below)
    if name is not None:
        named = {pid for pid, one in mine.items() if name in one.line}
        ranks = [one for one in ranks if one.process.pid in named or named & set(_above(one.process, everything))]
    if not ranks:
        ranks = _unnumbered(mine, below, pids, name)
    jobs: dict[str, list[Found]] = {}
    for one in ranks:
        jobs.setdefault(one.job, []).append(one)
    if not jobs:
        return [], [_why_none(everything, uid, name, pids)]
    notes = []
    chosen = max(jobs, key=lambda job: (len(jobs[job]), max(one.process.start for one in jobs[job])))
    for job, others in jobs.items():
        alone = job.startswith("pid ") and len(others) == 1  # such as a notebook, of no interest beside a job
        if job != chosen and not (alone and len(jobs[chosen]) > 1):
            pid = others[0].process.pid
            notes.append(f"another job is here too ({len(others)} ranks, one is pid {pid}): `--pid {pid}` looks at it")
    found = jobs[chosen]
    tops = {one.process.pid for one in ranks} | {pid for pid, one in everything.items() if WATCHDOG in one.line}
    for one in found:
        one.children = [everything[pid] for pid in descendants(one.process.pid, below, tops)]
    notes += _zombies(found, everything, below)
    found.sort(key=lambda one: (one.rank is None, one.rank or 0, one.process.pid))
    return found, notes


def ranks_beside(pid: int, *, spawned: bool) -> list[int]:
    """Where to look for the ranks of the job that `pid` is of: themselves, or what started them by multiprocessing."""
    everything = processes()
    if pid not in everything:
        return [pid]
    mine = {number: one for number, one in everything.items() if one.uid == everything[pid].uid}
    ranks = _numbered(mine, children_of(everything))
    jobs = [one.job for one in ranks if one.process.pid == pid]
    if jobs:
        return [one.process.pid for one in ranks if one.job == jobs[0]]
    return [everything[pid].parent if spawned else pid]


def job_of(env: Mapping[str, str]) -> str:
    """What the ranks of a job share, by the environment of one of them; "" where there is no launcher."""
    who = _identity(env)
    return _job(env, who[0]) if who is not None else ""


def processes(below: Collection[int] = ()) -> dict[int, Process]:
    """All processes of this node, or these and those below them."""
    if not os.path.isdir("/proc/self"):
        raise MldebugError("there is no /proc here, and ranks are found in it", "look at the job on a Linux machine")
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
    if below:  # all of the rest is not read: whoever watches a job does this again and again
        children: dict[int, list[int]] = {}
        for pid in pids:
            with contextlib.suppress(OSError, IndexError):
                parent = int(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(pid)
        pids = sorted({pid for top in below for pid in (top, *descendants(top, children))})
    return {pid: one for pid in pids if (one := look_up(pid)) is not None}


def look_up(pid: int) -> Process | None:
    """One process, or None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        uid = os.stat(f"/proc/{pid}").st_uid
        command = _read(f"/proc/{pid}/cmdline").split("\0")
    except (OSError, IndexError):
        return None
    start = boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    words = tuple(command[:-1] if command[-1:] == [""] else command)
    return Process(pid, int(fields[1]), fields[0], start, uid, words, _environment(pid))


@lru_cache(maxsize=1)
def boot_time() -> float:
    match = re.search(r"^btime (\d+)", _read("/proc/stat"), re.M)
    return float(match.group(1)) if match else 0.0


def children_of(everything: dict[int, Process]) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for one in everything.values():
        below.setdefault(one.parent, []).append(one.pid)
    return below


def descendants(pid: int, below: dict[int, list[int]], stop: Collection[int] = ()) -> Iterator[int]:
    """The processes below one, parents first; those in `stop` and what is below them are left out."""
    for child in sorted(below.get(pid, [])):
        if child not in stop:
            yield child
            yield from descendants(child, below, stop)


def runs_python(one: Process) -> bool:
    """Whether it is a Python interpreter, or a program with one inside."""
    with contextlib.suppress(OSError):
        if os.path.basename(os.readlink(f"/proc/{one.pid}/exe")).startswith(("python", "pypy")):
            return True
    with contextlib.suppress(OSError):
        return "libpython" in _read(f"/proc/{one.pid}/maps")
    return bool(one.command) and "python" in os.path.basename(one.command[0])


def _numbered(mine: dict[int, Process], below: dict[int, list[int]]) -> list[Found]:
    """The processes that have a number from a launcher: the topmost that runs Python, of each with the same numbers."""
    identities = {pid: who for pid, one in mine.items() if (who := _identity(one.env)) is not None}
    tops = [
        pid
        for pid, who in identities.items()
        if identities.get(mine[pid].parent) != who and not _starts_ranks(pid, who, identities, below)
    ]
    found = []
    for top in tops:
        same = [pid for pid in (top, *descendants(top, below)) if identities.get(pid) == identities[top]]
        pid = next((pid for pid in same if runs_python(mine[pid])), None)
        if pid is None:
            if mine[top].state not in "ZX" and len(same) > 1:
                continue
            pid = top
        level, rank, local, size = identities[top]
        found.append(Found(mine[pid], rank, local, size, _job(mine[pid].env, level)))
    # A process that was orphaned keeps the numbers of a rank that is here already: it is no second one.
    seen: dict[tuple[str, int | None], Found] = {}
    for one in sorted(found, key=lambda one: (one.process.parent == 1, one.process.start)):
        seen.setdefault((one.job, one.rank), one)
    return list(seen.values())


_Identity = tuple[int, int, "int | None", int]


def _starts_ranks(pid: int, who: _Identity, identities: dict[int, _Identity], below: dict[int, list[int]]) -> bool:
    return any(identities[lower][0] < who[0] for lower in descendants(pid, below) if lower in identities)


def _identity(env: Mapping[str, str]) -> _Identity | None:
    for level, (rank, local, size) in enumerate(_LAUNCHERS):
        if env.get(rank, "").isdecimal() and env.get(size, "").isdecimal():
            number = env.get(local, "")
            return level, int(env[rank]), int(number) if number.isdecimal() else None, int(env[size])
    return None


def _job(env: Mapping[str, str], level: int) -> str:
    """What ranks of one job share, on all nodes."""
    if level == 0 and env.get("MASTER_PORT"):
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    names = ("PMIX_NAMESPACE", "PALS_APID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    value = next((env[name] for name in names if env.get(name)), "")
    return f"{value}.{env['SLURM_STEP_ID']}" if value and env.get("SLURM_STEP_ID") else value


def _unnumbered(
    mine: dict[int, Process], below: dict[int, list[int]], pids: Sequence[int], name: str | None
) -> list[Found]:
    """Processes without a number: what a program started by multiprocessing, or one process alone.

    Without a hint only those with torch inside are a job.
    """
    asked = bool(pids) or name is not None
    candidates = {
        pid: one
        for pid, one in mine.items()
        if (name is None or name in one.line or _above_has(one, mine, name))
        and runs_python(one)
        and (asked or _has_torch(pid))
        and not _is_helper(one)
    }
    tops = [pid for pid, one in candidates.items() if one.parent not in candidates]
    found = []
    for top in sorted(tops):
        spawned = [pid for pid in below.get(top, []) if pid in candidates and _is_rank_like(candidates[pid])]
        if len(spawned) > 1:
            found += [Found(candidates[pid], None, None, len(spawned), f"pid {top}") for pid in sorted(spawned)]
        elif top not in pids or not any(pid in tops for pid in descendants(top, below)):
            found.append(Found(candidates[top], 0, 0, 1, f"pid {top}"))
    return found


def _is_rank_like(one: Process) -> bool:
    """Whether a child may be a rank: it talks to others by network, as workers that load data do not."""
    return _listens(one.pid)


def _listens(pid: int) -> bool:
    """Whether the process has an established or listening TCP socket of its own."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in _read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
                if line.split()[9] in inodes:
                    return True
    return False


def _has_torch(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return re.search(r"libtorch_(python|cpu|cuda)\.so", _read(f"/proc/{pid}/maps")) is not None
    return False


def _is_helper(one: Process) -> bool:
    return any(word in one.line for word in ("multiprocessing.resource_tracker", "multiprocessing.forkserver"))


def _above_has(one: Process, mine: dict[int, Process], name: str) -> bool:
    return any(name in above.line for above in _parents(one, mine))


def _above(one: Process, everything: dict[int, Process]) -> Iterable[int]:
    return (above.pid for above in _parents(one, everything))


def _parents(one: Process, everything: dict[int, Process]) -> Iterator[Process]:
    parent = everything.get(one.parent)
    while parent is not None:
        yield parent
        parent = everything.get(parent.parent) if parent.parent != parent.pid else None


def _zombies(found: list[Found], everything: dict[int, Process], below: dict[int, list[int]]) -> list[str]:
    """Processes beside the ranks that have ended, which their launcher has not noticed."""
    launchers = {one.process.parent for one in found}
    return [
        f"process {pid} under the launcher {launcher} has ended and was not waited for (zombie)"
        for launcher in sorted(launchers)
        for pid in below.get(launcher, [])
        if everything[pid].state == "Z" and launcher > 1
    ]


def _why_none(everything: dict[int, Process], uid: int, name: str | None, pids: Sequence[int]) -> str:
    if pids and name is None:
        return "; ".join(_what_it_is(everything[pid]) for pid in pids[:3])
    others = {one.uid for one in everything.values() if one.uid != uid and _identity(one.env) is not None}
    if others:
        return f"no rank of yours was found here; uid {min(others)} has some: `--user {min(others)}` looks at them"
    what = f"whose command line has {name!r}" if name else "with RANK and WORLD_SIZE in its environment, or with torch"
    return f"no process {what} was found"


def _what_it_is(one: Process) -> str:
    """Why there is nothing to look at in a process that was asked for."""
    if one.state in "ZX":
        return f"process {one.pid} has ended, and is a zombie of process {one.parent}"
    program = os.path.basename(one.command[0]) if one.command else "of the kernel"
    return f"process {one.pid} ({program}) does not run Python, and neither does any below it"


def _own() -> set[int]:
    """This process and those that it runs in: never a rank, but where a rank started us."""
    found = {os.getpid()}
    one = look_up(os.getppid()) if not from_inside else None
    while one is not None and one.pid > 1 and one.pid not in found:
        found.add(one.pid)
        one = look_up(one.parent)
    return found


def _uid(user: str | None) -> int:
    if user is None:
        return os.geteuid()
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except KeyError as exc:
        raise UsageError(f"there is no user {user!r} here", "`getent passwd` lists them") from exc


def _environment(pid: int) -> dict[str, str]:
    """The variables of interest in the environment that the process was started with."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in _read(f"/proc/{pid}/environ").split("\0"):
            key, sign, value = entry.partition("=")
            if sign and key in _KEPT:
                found[key] = value
    return found


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as stream:
        return stream.read()
