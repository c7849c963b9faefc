"""collect(): what can be seen of a job on this node, as evidence for the judge."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from mldebug.core.stacks import Stacks, dump, process_state
from mldebug.hang import _agent_files as agent
from mldebug.hang._evidence import ALL_LOCALS, SCHEMA
from mldebug.hang._find import (
    WATCHDOG,
    Found,
    Process,
    children_of,
    descendants,
    find_ranks,
    processes,
    runs_python,
)
from mldebug.hang._nccl import Watcher
from mldebug.hang._proc import io_of, locks_of, shared_pipes, switches_of, thread_ticks, ticks_of, wchan_of

if TYPE_CHECKING:
    from mldebug.hang._evidence import Child, Evidence, Frame, Local, Rank, Sample, Thread

_READERS = 4  # at once: a stack costs 10 ms of a core
_CHILDREN = 32  # of a rank whose stacks are read
_NATIVE = 4  # native stacks cost a second each and pause the process: of those that differ only
_PATIENCE = 5.0  # seconds that GPUs at work may issue nothing before that counts as standing still
_RECORD = 5.0  # seconds for the record of collectives; it takes 25 ms, on a machine that is not busy
_REPR = 400  # characters of a local that are kept


def collect(
    *,
    pids: Sequence[int] = (),
    name: str | None = None,
    user: str | None = None,
    samples: int = 2,
    interval: float = 0.5,
    native: bool = False,
    locals: bool = False,
    timeout: float = 10.0,
) -> Evidence:
    """Look at the ranks of a job on this node, `samples` times, `interval` seconds apart; nothing is stopped.

    Without a hint the ranks are found by what their launcher left in their environment; `pids` are ranks or processes
    above them, `name` is a part of a command line, `user` whose processes are looked at. Integers and process groups
    among the local variables are always kept, and all others with `locals` only: they may hold private data. `native`
    adds stacks of C and C++ for the ranks that stand apart, and pauses these. What cannot be read has a reason in
    `status` and `why`. Raises MldebugError where there is no /proc or no py-spy, and UsageError for a pid that is not
    there.

        evidence = collect(); verdict = judge(evidence)
    """
    deadline = time.monotonic() + timeout
    found, notes = find_ranks(pids, name, user)
    looks = [_Look(one) for one in found]
    nccl = Watcher({look.found.process.pid: look.found.process.env for look in looks})
    with ThreadPoolExecutor(_READERS) as pool:
        for number in range(max(1, samples)):
            began = time.monotonic()
            if number:
                _find_born(looks)
            tasks = [pool.submit(task, deadline, locals) for look in looks for task in look.tasks()]
            for task in tasks:
                task.result()
            nccl.sample()
            if number + 1 < samples:
                time.sleep(max(0.0, min(interval - (time.monotonic() - began), deadline - time.monotonic())))
        if samples > 1 and nccl.still:
            _look_again(pool, looks, nccl, deadline, locals)
        if native:
            list(pool.map(lambda look: look.add_native(timeout), _apart(looks)))
        if samples > 1:  # asked for last: it costs the job CPU, which must not look like work of its own
            for look in looks:
                look.agent.ask()
        records = list(pool.map(lambda look: look.agent.record(min(deadline, time.monotonic() + _RECORD)), looks))
    everyone = {pid for look in looks for pid in look.pids}
    locks, pipes = locks_of(everyone), shared_pipes(everyone)
    ranks = []
    for look, record in zip(looks, records, strict=True):
        rank = look.rank()
        rank["locks"] = [lock for lock in locks if lock["pid"] in look.pids]
        if pipes.get(rank["pid"]):
            rank["pipes"] = pipes[rank["pid"]]
        for child in rank["children"]:
            if pipes.get(child["pid"]):
                child["pipes"] = pipes[child["pid"]]
        if record is not None:
            rank["record"] = record
        if groups := nccl.communicators(rank["pid"]):
            rank["nccl"] = groups
        if cards := nccl.gpus(rank["pid"]):
            rank["gpus"] = cards
        ranks.append(rank)
    host = socket.gethostname()
    return {
        "schema": SCHEMA,
        "time": time.time(),
        "hosts": [{"host": host, "status": "ok"}],
        "ranks": ranks,
        "notes": [*([ALL_LOCALS] if locals else []), *notes, *nccl.notes()],
    }


def _find_born(looks: list[_Look]) -> None:
    """Children that a rank without any has started since it was found: without them its workers seem to have ended."""
    childless = [look for look in looks if not look.found.children and look.found.process.pid != os.getpid()]
    if childless:
        everything = processes()
        below = children_of(everything)
        stop = {os.getpid(), *(look.found.process.pid for look in looks)}
        stop |= {pid for pid, one in everything.items() if WATCHDOG in one.line}
        for look in childless:
            look.add([everything[pid] for pid in descendants(look.found.process.pid, below, stop)])


def _look_again(pool: ThreadPoolExecutor, looks: list[_Look], nccl: Watcher, deadline: float, everything: bool) -> None:
    """A step on GPUs may take seconds in which nothing is seen to move: wait for a sign, then look once more."""
    end = min(time.monotonic() + _PATIENCE, deadline - 1.0)
    pause = 0.25
    while nccl.still and time.monotonic() < end:
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        nccl.sample()
        pause *= 2  # each question goes to all nodes of the job
    tasks = [pool.submit(task, deadline, everything) for look in looks for task in look.tasks()]
    for task in tasks:
        task.result()


class _Look:
    """What is gathered of one rank."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.agent = agent.Reader(found.process.pid, found.process.env.get("MLDEBUG_AGENT"))
        self.samples: dict[int, list[Sample]] = {found.process.pid: []}
        self.results: dict[int, Stacks] = {}
        self.python: set[int] = set()
        self.native: list[Thread] = []
        self.add(found.children)

    def add(self, children: list[Process]) -> None:
        """Children to be looked at from now on."""
        self.found.children = children
        self.python |= {child.pid for child in children if child.state not in "ZX" and runs_python(child)}
        for child in children:
            self.samples[child.pid] = []

    @property
    def pids(self) -> list[int]:
        return list(self.samples)

    def tasks(self) -> Iterable[Any]:
        yield lambda deadline, everything: self._sample(self.found.process, True, deadline, everything)
        for number, child in enumerate(self.found.children):
            reads = child.pid in self.python and number < _CHILDREN
            yield lambda deadline, everything, child=child, reads=reads: self._sample(
                child, reads, deadline, everything
            )

    def _sample(self, process: Process, reads: bool, deadline: float, everything: bool) -> None:
        pid = process.pid
        now, ticks, state = time.time(), ticks_of(pid), process_state(pid) or "X"
        woke, io = switches_of(pid, pid), io_of(pid, pid)
        top = pid == self.found.process.pid
        if top:
            self.agent.sample()
        stacks = Stacks("not-python", "it does not run Python")
        if reads:
            left = deadline - time.monotonic()
            stacks = dump(pid, locals=True, timeout=min(5.0, left)) if left > 0 else Stacks("timeout", "no time left")
            if stacks.status in ("no-permission", "timeout", "not-python") and top:
                stacks = self.agent.stacks_by_signal(stacks)
            before = self.results.get(pid)
            if before is None or before.status != "ok" or stacks.status != "timeout":
                self.results[pid] = stacks
        spent = thread_ticks(pid, [thread["tid"] for thread in stacks.threads])
        threads = [_thread(thread, everything) for thread in stacks.threads if not _is_agent(thread)]
        ticks -= sum(spent.get(thread["tid"], 0) for thread in stacks.threads if _is_agent(thread))
        for thread in threads:
            tid = thread["tid"]
            if tid in spent:
                thread["ticks"] = spent[tid]
                thread["switches"], thread["io"] = switches_of(pid, tid), io_of(pid, tid)
        sample: Sample = {
            "time": now, "state": state, "ticks": ticks, "threads": threads, "wchan": wchan_of(pid),
            "woke": [woke, switches_of(pid, pid)], "io": [io, io_of(pid, pid)],
        }  # fmt: skip
        if state != "X" or not self.samples[pid]:
            self.samples[pid].append(sample)

    def add_native(self, timeout: float) -> None:
        stacks = dump(self.found.process.pid, native=True, timeout=timeout)
        self.native = [_thread(thread, False) for thread in stacks.threads]

    def rank(self) -> Rank:
        found, process = self.found, self.found.process
        stacks = self.results.get(process.pid, Stacks("timeout", "no time left"))
        samples = self.samples[process.pid]
        number, size = found.rank, found.world_size
        if number is None:
            number = _spawned_number(samples)
        rank: Rank = {
            "rank": number, "local_rank": found.local_rank if found.local_rank is not None else number,
            "world_size": size, "pid": process.pid, "host": socket.gethostname(), "start": process.start,
            "job": found.job, "command": process.line, "status": stacks.status, "state": samples[-1]["state"],
            "samples": samples, "children": [self._child(child) for child in found.children], "locks": [],
        }  # fmt: skip
        if stacks.status != "ok":
            rank["why"] = stacks.why
        if found.local_world_size is not None:
            rank["local_world_size"] = found.local_world_size
        if self.native:
            rank["native"] = self.native
        if (progress := self.agent.progress()) is not None:
            rank["progress"] = progress
        return rank

    def _child(self, process: Process) -> Child:
        samples = self.samples[process.pid]
        child: Child = {
            "pid": process.pid, "parent": process.parent, "command": process.line,
            "kind": _kind_of_child(process, samples, process.pid in self.python),
            "state": samples[-1]["state"] if samples else process.state, "samples": samples,
        }  # fmt: skip
        stacks = self.results.get(process.pid)
        if stacks is not None and stacks.status != "ok":
            child["why"] = stacks.why
        return child


def _kind_of_child(process: Process, samples: list[Sample], python: bool) -> str:
    frames = [frame for sample in samples for thread in sample["threads"] for frame in thread["frames"]]
    if any(frame["name"] == "_worker_loop" for frame in frames):
        return "dataloader"
    files = {frame["file"] for frame in frames}
    if "multiprocessing" in process.line or any("multiprocessing/" in file for file in files):
        return "multiprocessing"
    return "python" if python else "other"


def _spawned_number(samples: list[Sample]) -> int | None:
    """The number that torch.multiprocessing.spawn gave to a process: it is no variable of its environment."""
    for sample in samples:
        for thread in sample["threads"]:
            for frame in thread["frames"]:
                if frame["name"] == "_wrap" and frame["file"].endswith("torch/multiprocessing/spawn.py"):
                    for local in frame.get("locals", []):
                        if local["name"] == "i" and local["repr"].isdecimal():
                            return int(local["repr"])
    return None


def _apart(looks: list[_Look]) -> list[_Look]:
    """The ranks whose main thread stands where few others do."""
    places = [_place(look) for look in looks]
    counts = Counter(places)
    order = sorted(range(len(looks)), key=lambda index: counts[places[index]])
    return [looks[index] for index in order[:_NATIVE]]


def _place(look: _Look) -> tuple[tuple[str, int], ...]:
    samples = look.samples[look.found.process.pid]
    for thread in samples[-1]["threads"] if samples else []:
        if thread["name"] == "MainThread":
            return tuple((frame["file"], frame["line"]) for frame in thread["frames"])
    return ()


def _thread(raw: dict[str, Any], everything: bool) -> Thread:
    thread = cast("Thread", {**raw, "frames": []})
    for one in raw["frames"]:
        frame: Frame = {"name": one["name"], "file": one["file"], "line": one["line"]}
        kept = [local for local in one.get("locals", []) if everything or _is_harmless(local, one["file"])]
        if kept:
            frame["locals"] = [
                {"name": local["name"], "repr": local["repr"][:_REPR], "arg": local["arg"]} for local in kept
            ]
        thread["frames"].append(frame)
    return thread


def _is_agent(raw: dict[str, Any]) -> bool:
    """Whether a thread is ours: it is no part of the program."""
    return any(frame["file"].endswith("mldebug/hang/_agent.py") for frame in raw["frames"])


_PLAIN = re.compile(r"-?\d+|True|False|None")


def _is_harmless(local: Local, file: str) -> bool:
    """Integers and groups say where a rank is; what torch.distributed itself was called with is no secret either."""
    text = local["repr"]
    if _PLAIN.fullmatch(text) or "ProcessGroup" in text or "DeviceMesh" in text:
        return True
    if local["name"] in ("group", "group_desc", "group_name", "pg_name", "op", "tag", "backend"):
        return True
    return "torch/distributed/" in file and not text.startswith(("'", '"'))
