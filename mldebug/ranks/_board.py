"""A board: where the ranks of a job leave short notes for each other, without a collective.

It is the first of these that is there: a store that is given, torchrun's, that of the process group, a folder of the
node if all ranks are on it, a store at MASTER_ADDR:MASTER_PORT. No call on it waits longer than a connection takes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

from mldebug.core.errors import MldebugError
from mldebug.ranks._files import FolderBoard
from mldebug.ranks._world import Who, distributed

Note = dict[str, Any]


class Board(Protocol):
    """Notes by name. `claim` writes only where nothing is, and returns what is there in the end."""

    def write(self, name: str, note: Note) -> None: ...

    def read(self, name: str) -> Note | None: ...

    def claim(self, name: str, note: Note) -> Note: ...


def board_for(me: Who, *, node_only: bool, store: Any = None, timeout: float = 60.0) -> Board:
    """The board of this job; with `node_only` one that the ranks of this node share will do.

    Raises MldebugError where there is none, and where the store cannot be reached in `timeout` seconds.
    """
    if store is not None:
        return StoreBoard(store)
    env = os.environ
    where = (env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""))
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and where[1].isdecimal():
        return _open(where[0], int(where[1]), False, min(timeout, 60.0))
    if distributed() is not None:
        return StoreBoard(_own_connection(_store_of_group()))
    if node_only or (me.local_size is not None and me.local_size == me.size):
        return FolderBoard(me.local_size, me.rank)
    if where[0] and where[1].isdecimal():
        return _open(where[0], int(where[1]), me.rank == 0, timeout)
    raise MldebugError(
        f"rank {me.rank} of {me.size} has no way to the others: torch.distributed is not initialised, and MASTER_ADDR "
        "and MASTER_PORT are not set",
        "call torch.distributed.init_process_group() first, or set MASTER_ADDR and MASTER_PORT for all ranks",
    )


class StoreBoard:
    """A board in a store of torch.distributed; `serves` says that this process has it, and ends it when it ends."""

    def __init__(self, store: Any, *, serves: bool = False) -> None:
        self._store, self.serves = store, serves
        self._awaited: list[str] | None = None

    def write(self, name: str, note: Note) -> None:
        with _told(self._store):
            self._store.set(_PREFIX + name, json.dumps(note))

    def read(self, name: str) -> Note | None:
        with _told(self._store):
            if not self._store.check([_PREFIX + name]):  # get() would wait for it
                return None
            return _loads(self._store.get(_PREFIX + name))

    def claim(self, name: str, note: Note) -> Note:
        with _told(self._store):
            return _loads(self._store.compare_set(_PREFIX + name, "", json.dumps(note)))

    def stay_for(self, names: list[str]) -> None:
        """At exit, keep the store that this process has for others until they have left these notes: those of the
        last call, before which they have seen all others."""
        if self._awaited is None:
            atexit.register(self._stay, os.getpid())
        self._awaited = names

    def _stay(self, pid: int, seconds: float = 10.0) -> None:
        end, names = time.monotonic() + seconds, self._awaited or []
        with contextlib.suppress(MldebugError, KeyboardInterrupt):
            while names and os.getpid() == pid and time.monotonic() < end:
                names = [name for name in names if self.read(name) is None]
                time.sleep(0.05 if names else 0.0)


_PREFIX = "mldebug/"
_opened: dict[
    tuple[int, str, int], StoreBoard
] = {}  # kept as long as the process: rank 0's is the server of the others


def _open(address: str, port: int, serve: bool, timeout: float) -> StoreBoard:
    """A connection of our own: another thread may wait on the program's, with its lock held."""
    if importlib.util.find_spec("torch") is None:
        raise MldebugError(
            f"the ranks talk to each other by the store at {address}:{port}, and torch is not installed here",
            "run it with the Python of the program that is to be trained",
        )
    key = (os.getpid(), address, port)  # a forked child needs one of its own
    if key not in _opened:
        import torch.distributed as torch_distributed

        if not serve:
            _reach(address, port, timeout)
        try:
            # multi_tenant: init_process_group, later, has the same server
            store = torch_distributed.TCPStore(  # type: ignore[attr-defined]
                address, port, None, serve, timedelta(seconds=60), wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError) as exc:
            raise _unreachable(address, port, str(exc).partition("\n")[0]) from None
        _opened[key] = StoreBoard(store, serves=serve)
    return _opened[key]


def _reach(address: str, port: int, timeout: float) -> None:
    """Wait until somebody listens there. TCPStore would, too, but Ctrl-C does not end that."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=min(10.0, timeout)).close()
            return
        except OSError as exc:
            if time.monotonic() > end:
                raise _unreachable(address, port, exc.strerror or str(exc)) from None
        time.sleep(0.2)


def _unreachable(address: str, port: int, why: str) -> MldebugError:
    return MldebugError(
        f"the store at {address}:{port}, by which ranks talk to each other, cannot be reached: {why}",
        "rank 0 has it: did it come this far? See whether MASTER_ADDR and MASTER_PORT are the same on all ranks",
    )


def _store_of_group() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()  # there is no public name for it


def _own_connection(store: Any) -> Any:
    """The same store by another connection, if it is a TCPStore: see `_open`."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    if type(inner).__name__ == "TCPStore":
        return _open(inner.host, inner.port, False, 60.0)._store
    return store


@contextlib.contextmanager
def _told(store: Any) -> Any:
    try:
        yield
    except RuntimeError as exc:  # DistNetworkError and the others of torch are of this kind
        raise MldebugError(
            f"the store by which ranks talk to each other has failed: {str(exc).partition(chr(10))[0]}",
            "the process that has it (torchrun, or rank 0) has probably ended: its output says why",
        ) from None


def _loads(text: bytes | str) -> Note:
    note = json.loads(text)
    return note if isinstance(note, dict) else {}


def write_quietly(board: Board, name: str, note: Note) -> None:
    """Write while something else is failing already: that is to be seen, and not our own trouble."""
    with contextlib.suppress(MldebugError, OSError):
        board.write(name, note)
