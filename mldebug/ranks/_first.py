"""main_process_first and its kin: one rank runs a block before the others, and they learn if it failed."""

from __future__ import annotations

import math
import os
import time
import warnings
from typing import Any, TypeVar

from mldebug.core.errors import MldebugError, UsageError
from mldebug.core.scope import Scope
from mldebug.ranks._alive import Beat, Pause, Watched, card, named
from mldebug.ranks._board import Board, Note, StoreBoard, board_for, write_quietly
from mldebug.ranks._files import ticks
from mldebug.ranks._mounts import kind_of
from mldebug.ranks._site import base_of, count, site_of_caller, site_of_function
from mldebug.ranks._world import Who, distributed, host, local_rank, node_name, who

_Function = TypeVar("_Function")
_SHOW_AFTER = 2.0  # seconds of waiting, until a rank leaves word that it is here


class main_process_first(Scope):
    """Lets rank 0 run the block before all other ranks: it downloads, the others find the data there.

    The others wait without a collective, so that NCCL's timeouts do not run, and torch.distributed need not be
    initialised under torchrun. If rank 0 fails in the block (an exception, sys.exit, a signal), they get an
    MldebugError that names it, and likewise when `timeout` seconds are over (default: 30 minutes). The block itself
    must hold no collective: the ranks run it at different times.
    `group`: the first rank of this process group goes first, for its members. `store`: a store of torch.distributed by
    which they talk. `name`: what ranks have in common that call it from different functions.

        with main_process_first():
            data = load_dataset("big")
    """

    def __init__(
        self, *, timeout: float = 1800.0, group: Any = None, store: Any = None, name: str | None = None
    ) -> None:
        if not timeout > 0:
            raise UsageError(f"timeout is {timeout}, not a number of seconds above 0", "1800 is the default")
        self._timeout, self._group, self._store, self._name = timeout, group, store, name
        self._site = ""
        self._gates: list[_Gate] = []

    def start(self) -> None:
        me = who()
        if me.size == 1:
            return
        site = self._site or site_of_caller()
        try:
            for gate in self._plan(me, site):
                self._gates.append(gate)
                gate.enter()
        except BaseException as exc:
            self.stop(exc)
            raise

    def stop(self, exc: BaseException | None) -> None:
        while self._gates:
            self._gates.pop().leave(exc)

    def __call__(self, function: Any) -> Any:
        """Decorate: each function is a place of its own, whoever calls it."""
        mine = type(self).__new__(type(self))
        kept = {key: value for key, value in vars(self).items() if not key.startswith("_scope_")}
        vars(mine).update(kept, _gates=[], _site=site_of_function(function))
        return Scope.__call__(mine, function)

    def _plan(self, me: Who, site: str) -> list[_Gate]:
        if self._group is None:
            return [self._gate(me, site, "all", 0, range(me.size))]
        dist = distributed()
        if dist is None:
            raise UsageError("group= is given and torch.distributed is not initialised", "leave group= out")
        ranks = [] if self._group == dist.GroupMember.NON_GROUP_MEMBER else dist.get_process_group_ranks(self._group)
        if me.rank not in ranks:
            raise UsageError(f"rank {me.rank} is not in the group it waits with", "call it on members of the group")
        if len(ranks) == 1:
            return []
        return [self._gate(me, site, "group " + "-".join(map(str, ranks)), ranks[0], ranks)]

    def _gate(self, me: Who, site: str, scope: str, main: int | None, ranks: Any) -> _Gate:
        """`main` is the rank that goes first, None where that is the one whose local rank is 0."""
        node_only = scope.startswith("node")
        board = board_for(me, node_only=node_only, store=self._store, timeout=self._timeout)
        first = me.rank == main if main is not None else local_rank() == 0
        base = base_of(me, f"first/{scope}/{self._name or site.rpartition(':')[0]}")
        place = self._name if self._name is not None else site
        return _Gate(board, f"{base}/{count(base)}", me, first, ranks, place, self._timeout)


class local_main_process_first(main_process_first):
    """Lets local rank 0 of each node run the block before the other ranks of its node; see `main_process_first`.

    For folders that nodes do not share, such as /tmp. Where the ranks have no store, files in /dev/shm do. `timeout` is
    in seconds. The other ranks of the node get an MldebugError when local rank 0 fails or dies in the block, when it
    does not come or end within `timeout`, and when two processes say that they are local rank 0; a `timeout` that is
    not above 0 is a UsageError.

        with local_main_process_first():
            unpack("data.tar", "/tmp/data")
    """

    def __init__(self, *, timeout: float = 1800.0, store: Any = None, name: str | None = None) -> None:
        super().__init__(timeout=timeout, store=store, name=name)

    def _plan(self, me: Who, site: str) -> list[_Gate]:
        return [] if me.local_size == 1 else [self._gate(me, site, f"node {node_name()}", None, None)]


class main_process_by_path_first(main_process_first):
    """Lets the rank go first that `path` needs: local rank 0 of each node if it is on a disk of the node, else rank 0.

    The type of the mount decides (ext4, xfs, overlay ...; nfs4, lustre, gpfs, beegfs ...). Where it does not say, as
    with 9p and unknown types, rank 0 goes first, then local rank 0 of each node, then the others, which is right for
    both, and the type is warned of. The path need not exist. `timeout` is in seconds; what the waiting ranks get when
    the first one fails or is late is the MldebugError of `main_process_first`.

        with main_process_by_path_first("/data/cache"):
            data = load_dataset("big", cache_dir="/data/cache")
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: float = 1800.0, store: Any = None, name: str | None = None
    ) -> None:
        super().__init__(timeout=timeout, store=store, name=name)
        self._path = os.fspath(path)

    def _plan(self, me: Who, site: str) -> list[_Gate]:
        kind, mount = kind_of(self._path)
        several = me.local_size != me.size
        if not several:
            kind = "shared"  # one node: the same for all, and rank 0 may go first in any case
        elif kind == "unknown":
            warnings.warn(
                f"{self._path} is on {mount.type} at {mount.point}, which may be shared by nodes or not: rank 0 goes "
                "first, then local rank 0 of each node",
                stacklevel=2,
            )
        if several:
            self._agree(me, site, kind, mount.type)
        gates = []
        if kind != "local":
            gates.append(self._gate(me, site, "all", 0, range(me.size)))
        if kind != "shared" and me.local_size != 1:
            gates.append(self._gate(me, site, f"node {node_name()}", None, None))
        return gates

    def _agree(self, me: Who, site: str, kind: str, type_: str) -> None:
        """Nodes with different mounts would wait for different ranks. Where they cannot talk, the timeout ends that."""
        try:
            board = board_for(me, node_only=False, store=self._store, timeout=self._timeout)
        except MldebugError:
            if kind == "local":
                return
            raise
        base = base_of(me, f"kind/{self._name or site.rpartition(':')[0]}")
        mine = {"kind": kind, "type": type_, **card(me)}
        first = board.claim(f"{base}/{count(base)}", mine)
        if first.get("kind") != kind:
            error = MldebugError(
                f"{self._path} is not the same on all nodes: {kind} ({type_}) for rank {me.rank} on {host()}, "
                f"{first.get('kind')} ({first.get('type')}) for {named(first)}",
                "mount it alike on all nodes, or say main_process_first() or local_main_process_first() yourself",
            )
            if me.rank == 0:  # for which those of the other kind wait
                gate = self._gate(me, site, "all", 0, range(me.size))
                gate.enter()
                gate.leave(error)
            raise error


class _Gate:
    """One call: the main process passes and says so when it leaves; the others wait for that."""

    def __init__(self, board: Board, key: str, me: Who, first: bool, ranks: Any, site: str, timeout: float) -> None:
        self._board, self._key, self._me, self._first = board, key, me, first
        self._ranks, self._site, self._timeout = ranks, site, timeout
        self._card: Note = {}
        self._beat: Beat | None = None

    def enter(self) -> None:
        if not self._first:
            self._wait()
            return
        mine = {**card(self._me), "state": "in", "site": self._site}
        found = self._board.claim(self._key, mine)
        if found.get("node") == mine["node"] and ticks(int(found["pid"])) != found["ticks"]:
            found = mine  # of ranks that torchrun replaced, without counting that as a restart
            self._board.write(self._key, mine)
        if (found.get("pid"), found.get("ticks"), found.get("host")) != (mine["pid"], mine["ticks"], mine["host"]):
            raise MldebugError(
                f"two main processes: {named(mine)} and {named(found)} both go first at {self._site}",
                "each process needs its own RANK and LOCAL_RANK; `env | grep -E 'RANK|SLURM_|OMPI_'` shows them",
            )
        self._card = mine
        self._beat = Beat(self._board, f"{self._key}/beat")

    def leave(self, exc: BaseException | None) -> None:
        if self._beat is None:
            return
        self._beat.stop()
        failed = exc is not None and not isinstance(exc, GeneratorExit)
        note = {**self._card, "state": "failed" if failed else "done"}
        if isinstance(self._board, StoreBoard) and self._board.serves:
            note["serves"] = True
            self._board.stay_for([f"{self._key}/told/{one}" for one in self._ranks or [] if one != self._me.rank])
        if failed:
            note["error"] = f"{type(exc).__name__}: {_text(exc)}"[:2000]
            write_quietly(self._board, self._key, note)
            return
        try:
            self._board.write(self._key, note)
        except MldebugError as trouble:  # the work is done: this rank goes on, and the others see to themselves
            warnings.warn(
                f"the ranks that wait at {self._site} cannot be told to go on: {trouble.message}", stacklevel=2
            )

    def _wait(self) -> None:
        begin = time.monotonic()
        watched, pause, shown = Watched(self._board, f"{self._key}/beat"), Pause(self._me.size), False
        while True:
            note = self._board.read(self._key)
            if note is not None:
                if note["state"] == "in" and (why := watched.is_gone(note)):
                    note = self._board.read(self._key) or note  # it may have gone on and ended in between
                    if note["state"] == "in":
                        raise MldebugError(
                            f"{named(note)} {why} in the block that goes first ({note['site']}); rank {self._me.rank} "
                            "waited for it",
                            f"its own output says more; was it out of memory? `dmesg -T | tail` on {note['host']}",
                        )
                if note["state"] != "in" and note.get("serves"):  # it stays until all of us know
                    write_quietly(self._board, f"{self._key}/told/{self._me.rank}", {"told": True})
                if note["state"] == "failed":
                    raise MldebugError(
                        f"{named(note)} failed in the block that goes first ({note['site']}): {note['error']}",
                        "its own output has the traceback; the block was not run on the other ranks",
                    )
                if note["state"] == "done":
                    self._compare(str(note["site"]))
                    return
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise self._late(note, waited)
            if not shown and waited > min(_SHOW_AFTER, self._timeout / 2):
                shown = True
                self._board.write(f"{self._key}/came/{self._me.rank}", {"host": host()})
            pause()

    def _compare(self, site: str) -> None:
        """Calls of one function are counted together: where a rank leaves one out, its next one is taken for that."""
        if site != self._site:
            warnings.warn(
                f"rank {self._me.rank} waited at {self._site} for the main process, which was at {site}: if these two "
                "do not belong together, a rank has left a call out; name= tells them apart, or marks them as the same",
                stacklevel=2,
            )

    def _late(self, note: Note | None, waited: float) -> MldebugError:
        if note is not None:
            return MldebugError(
                f"rank {self._me.rank} has waited {waited:.0f} s for {named(note)}, which is still in the block that "
                f"goes first ({note['site']})",
                f"`mldebug spy` on {note['host']} shows where; if it needs that long: timeout={math.ceil(waited) * 4}",
            )
        who_ = "local rank 0 of this node" if self._ranks is None else f"rank {next(iter(self._ranks))}"
        missing = ""
        if self._ranks is not None:
            time.sleep(0.2)  # the others, whose time is over as well, leave word too
            away = [one for one in self._ranks if self._board.read(f"{self._key}/came/{one}") is None]
            missing = f"; these ranks never came: {spans(away)}"
        return MldebugError(
            f"rank {self._me.rank} on {host()} has waited {waited:.0f} s at {self._site} for {who_}, which never came "
            f"there{missing}",
            "call it on all ranks, in the same function and equally often, or give the calls that belong together the "
            "same name=",
        )


def spans(ranks: list[int]) -> str:
    """Rank numbers as one reads them: 0, 2-7."""
    found: list[list[int]] = []
    for one in sorted(ranks):
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _text(exc: BaseException | None) -> str:
    try:
        return str(exc)
    except Exception:  # of a user's exception class
        return "(its message cannot be printed)"
