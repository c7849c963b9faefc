"""The agent: what a job tells about itself to spy and watch, from inside.

It has a heartbeat in shared memory (it stands still while an extension holds the GIL), the step that `mark` counts,
the record of collectives when it is asked for, and stacks by signal where ptrace is not permitted. It is one thread
that sleeps, and starts by `enable()`, or by MLDEBUG_AGENT in the environment of a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from mldebug.hang._page import (
    ANSWERED,
    ASKED,
    BEAT,
    ENVIRONMENT,
    KINDS,
    MAGIC,
    MARKS,
    SIGN,
    SIGNAL,
    SIZE,
    START,
    STEP,
    folder_for,
    is_private,
    reclaim_files,
    start_ticks,
)

_BEAT = 0.1  # seconds: two looks half a second apart see it move; 20 us of CPU each
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_page: memoryview | None = None  # eight numbers, see _page.py
_agent: _Agent | None = None
each_second: list[Callable[[], None]] = []  # what the agent's thread has to do besides


def enable() -> bool:
    """Let spy and watch see more of this process; returns whether that works here (it needs Linux).

    They then get stacks without ptrace, the record of collectives of gloo and NCCL, and a heartbeat that tells a held
    GIL. Costs one thread that sleeps. Calling it again does nothing.

        mldebug.hang.enable()
        torch.distributed.init_process_group()
    """
    global _agent
    if _agent is None and _open_page():
        _agent = _Agent(_stem())
    return _agent is not None


def mark(step: int) -> None:
    """Say that the program has come to `step`: whoever watches it sees it advance. Costs less than a microsecond.

    `step` is a whole number; it may stay the same or begin anew, as each call counts as progress. Where there is no
    shared memory (not Linux) it does nothing.

        for step, batch in enumerate(batches):
            mldebug.hang.mark(step)
    """
    page = _page
    if page is None:
        if not _open_page():
            return
        page = _page
        assert page is not None
    page[STEP] = step
    page[MARKS] += 1


def start_from_environment() -> None:
    """Called at the start of each Python process that has MLDEBUG_AGENT: starts in ranks, and never fails."""
    if any(os.environ.get(name, "").isdecimal() for name in _RANKS):
        with contextlib.suppress(Exception):
            enable()


_failed = False


def _open_page() -> bool:
    """Make the page of this process, once."""
    global _page, _failed
    if _page is not None or _failed:
        return _page is not None
    try:
        folder = folder_for(os.environ.get(ENVIRONMENT), os.geteuid())
        os.makedirs(folder, mode=0o700, exist_ok=True)
        start = start_ticks("self")
        if start < 0 or not is_private(folder, os.geteuid()):
            _failed = True
            return False
        handle = os.open(f"{_stem()}.page", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            # Memory that is had for sure: a full /dev/shm would else kill the program when it first writes to the page.
            os.posix_fallocate(handle, 0, SIZE)
            page = memoryview(mmap.mmap(handle, SIZE)).cast("q")
        finally:
            os.close(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(f"{_stem()}.page")
        _failed = True
        return False
    page[START] = start
    page[MAGIC] = SIGN
    with contextlib.suppress(OSError):
        reclaim_files(folder)
    _page = page
    atexit.register(_leave, os.getpid())
    os.register_at_fork(after_in_child=_forget)
    return True


def _stem() -> str:
    return os.path.join(folder_for(os.environ.get(ENVIRONMENT), os.geteuid()), str(os.getpid()))


def _forget() -> None:
    """In a forked child: the page is its parent's, and the agent's thread is not here."""
    global _page, _agent, _failed
    _page, _agent, _failed = None, None, True
    each_second.clear()


def _leave(pid: int) -> None:
    if os.getpid() != pid:
        return
    if _agent is not None:
        _agent.stop()
    stem = _stem()
    for kind in KINDS:
        with contextlib.suppress(OSError):
            os.unlink(f"{stem}.{kind}")


class _Agent:
    """The thread and the handler of the signal."""

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._ending = False
        self._names: set[int] = set()
        self._stacks: IO[str] | None = None
        self._listen()
        # Dumps have a thread of their own, which stays: the heart goes on meanwhile, and whoever counts the CPU of the
        # program can tell theirs from it.
        self._wanted = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name="mldebug-agent", daemon=True),
            threading.Thread(target=self._record, name="mldebug-record", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """A thread that is inside of torch while the interpreter ends would crash it."""
        self._ending = True
        self._wanted.set()
        for thread in self._threads:
            thread.join(10)

    def _listen(self) -> None:
        """Have faulthandler write the stacks when the signal comes: in C, with the GIL held or not."""
        number = signal.SIGRTMAX - 7  # programs and launchers use SIGUSR1, SIGUSR2 and the first real-time signals
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
            self._stacks = os.fdopen(os.open(f"{self._stem}.stacks", flags, 0o600), "w", encoding="utf-8")
            faulthandler.register(number, file=self._stacks, all_threads=True, chain=False)
            assert _page is not None
            _page[SIGNAL] = number

    def _run(self) -> None:
        page = _page
        while page is not None and not self._ending:
            page[BEAT] += 1
            if page[BEAT] % 10 == 1:
                self._name_threads()
                for task in tuple(each_second):
                    with contextlib.suppress(Exception):
                        task()
            if page[ASKED] != page[ANSWERED]:
                self._wanted.set()
            time.sleep(_BEAT)

    def _record(self) -> None:
        page = _page
        while page is not None:
            self._wanted.wait()
            if self._ending:
                return
            self._wanted.clear()
            asked = page[ASKED]
            if asked != page[ANSWERED]:
                with contextlib.suppress(Exception):
                    if _records():
                        _write(f"{self._stem}.groups", json.dumps(_groups()).encode())
                        _write(f"{self._stem}.record", _dump())
                page[ANSWERED] = asked

    def _name_threads(self) -> None:
        """faulthandler knows threads by their address only."""
        threads = threading.enumerate()
        if {thread.ident for thread in threads} != self._names:
            self._names = {thread.ident for thread in threads if thread.ident is not None}
            table = {str(thread.ident): [thread.name, thread.native_id] for thread in threads}
            with contextlib.suppress(OSError):
                _write(f"{self._stem}.threads", json.dumps(table).encode())


def _records() -> bool:
    """Whether torch records collectives in this process by now. Imports nothing: the program's import may be on."""
    distributed = sys.modules.get("torch.distributed")
    try:
        return bool(distributed is not None and distributed.is_initialized())
    except Exception:
        return False


def _dump() -> bytes:
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    with _without_inductor():
        if "nccl" in str(sys.modules["torch.distributed"].get_backend()) and hasattr(c10d, "_dump_nccl_trace"):
            return bytes(c10d._dump_nccl_trace())
        return bytes(c10d._dump_fr_trace())


def _groups() -> dict[str, list[int]]:
    """The ranks of each group, by the name that the record has for it: gloo's record leaves them out."""
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    return {str(world.pg_names[group]): sorted(ranks) for group, ranks in list(world.pg_group_ranks.items())}


class _Inductor:
    """Stands for torch._inductor, which it imports for any thread but the one that made it."""

    def __init__(self) -> None:
        self._maker = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._maker:
            raise AttributeError(name)
        return getattr(importlib.import_module("torch._inductor"), name)


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """A dump asks torch._inductor for the lines of compiled code, and so imports it, with 800 modules: seconds of CPU.

    Where the program has not loaded it there is no compiled code, and nothing to ask for.
    """
    names = vars(sys.modules["torch"])
    if "torch._inductor" in sys.modules or "_inductor" in names:
        yield
        return
    stand_in = names["_inductor"] = _Inductor()
    try:
        yield
    finally:
        if names.get("_inductor") is stand_in:  # else the program has imported it meanwhile
            del names["_inductor"]


def _write(path: str, data: bytes) -> None:
    """Whoever reads it sees all of it or none."""
    handle = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(f"{path}.new", path)
    except OSError:  # no room
        os.unlink(f"{path}.new")
        raise
