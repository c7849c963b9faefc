"""The ranks of a distributed job stop together at an event, or drop the same batch, and all know who was first."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mldebug.core.world import world
from mldebug.numerics._event import Event, Operation
from mldebug.numerics.distributed._asked import answer_to, decision, declare, ranks_here, together_or_alone, vote
from mldebug.numerics.distributed._channel import Channel, Entry
from mldebug.numerics.distributed._deadline import Deadline, in_join
from mldebug.numerics.ops._operands import Operand

if TYPE_CHECKING:
    from mldebug.numerics._recorder import DebugUnderflowOverflow

GIVE_UP = 7.0  # seconds after an event until which a rank waits for the others before it leaves
_SETTLE = 0.3  # seconds in which an event of another rank may still turn out to be the first
_PEERS = 64  # events that are kept
_WAIT = 60.0  # seconds that a rank waits for the others' word on a batch (on_event="skip")
_FIRST_WAIT = 10.0  # the same, once, for the ranks that do not use the recorder or come late
_HEAR = 5.0  # seconds that reading the log may take, on a machine that is busy
_READY = 5.0  # seconds in which all ranks must be ready to run a forward again
_REPLAY = 60.0  # seconds in which they must have run it
_PHASES = ("init", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Peer:
    """An event on some rank, as the side channel tells of it. `order` counts in the order all ranks agree on."""

    rank: int
    host: str
    time: float  # by that rank's own clock
    step: int  # of its recorder when it was seen: that of the event, or later
    waits: bool  # that rank goes on to its optimizer step before it stops
    stop: bool
    wish: bool  # it wants the forward to be run again by all
    round: int
    order: int
    event: Event


class Together:
    """The side channel as the recorders of one process use it."""

    def __init__(self, store: Any, rank: int, size: int, serial: int) -> None:
        self.rank, self.size = rank, size
        self.users: list[DebugUnderflowOverflow] = []
        self.asked: Peer | None = None  # the event of another rank, for which this one is to stop
        self.raised = False  # some rank has stopped: nobody need go on for its sake
        self.since = 0.0  # when the event became known here, and when a rank stopped for it
        self.since_raised = 0.0
        self.replaying_until = 0.0  # all ranks run a forward again: its collectives will be complete
        self.leaving = threading.Lock()  # taken by whoever ends this rank's run: an exception or the deadline
        self.thread = threading.get_ident()  # the one that trains
        self.device: int | None = None  # and its CUDA device
        self._peers: list[Peer] = []
        self._round = 0  # stops that are behind us
        self._deadline: Deadline | None = None
        self._agreed: dict[int, int] = {}  # id of a recorder -> batches that were agreed on
        self._alone = False  # there is no agreeing on batches: some rank does not take part
        self._abstains = False  # this one does not, and has said so
        self._joined = False  # this rank has no more batches, and takes part in the collectives of those that have
        self.channel = Channel(store, rank, _name(serial), self._heard, self._look)

    # An event.

    def announce(self, event: Event, step: int, stop: bool, waits: bool, wish: bool = False) -> None:
        """Tell the others of an event here, or more of one. Does not wait."""
        entry = {
            "kind": "event", "rank": self.rank, "host": world().host, "time": time.time(), "step": step,
            "stop": stop, "waits": waits, "wish": wish, "round": self._round, "event": event.to_dict(),
        }  # fmt: skip
        self.since = self.since or time.monotonic()
        self.channel.post(entry)
        self._watch()
        if wish:  # it must be out before the collectives of backward, after which the others look for it: see wish()
            self.channel.news(_HEAR)

    def settle(self) -> None:
        """Before a report is made: hear what others have to say of the same step."""
        end = time.monotonic() + _SETTLE
        while self.channel.news(_SETTLE) and time.monotonic() < end:
            time.sleep(0.05)

    def first(self) -> Peer | None:
        """The first event of the job since the last stop: by step and phase, then in the order of the log.

        Clocks of several machines differ, so time decides nothing.
        """
        return min(self.events(), key=_order, default=None)

    def events(self) -> list[Peer]:
        """What all ranks have seen since the last stop."""
        return [peer for peer in list(self._peers) if peer.round >= self._round]

    def wants_stop(self, step: int, stepping: bool) -> bool:
        """Whether another rank's event stops this one here: before its optimizer steps, or before a forward.

        A rank that has seen an event in a forward goes on to its optimizer step, and needs us for that.
        """
        asked = self.asked
        if asked is None:
            return False
        return self.raised or not asked.waits or step > asked.step or (stepping and step == asked.step)

    def listen(self, step: int) -> None:
        """Gradients here are not finite for no reason of this rank: wait until one has said why, or none can."""
        key, end = f"unshown/{self._round}/{step}", time.monotonic() + 3.0
        self.channel.tell(lambda store: store.add(key, 1))
        while self.asked is None and time.monotonic() < end and self.channel.news(1.0):
            if self.asked is not None or self.channel.ask(lambda store: store.add(key, 0) >= ranks_here(store), 1.0):
                return
            time.sleep(0.02)

    def wish(self, step: int) -> int | None:
        """The batch of this step that a rank wants all to run again.

        The collectives of backward lie between its wish and this question, so it is in the log by now.
        """
        self.channel.news(_HEAR)
        wishes = [peer for peer in self.events() if peer.wish and peer.step == step]
        return min((peer.event.batch for peer in wishes), default=None)

    def ready(self, what: str, why_not: str) -> str:
        """Wait until all ranks are ready to do something together; "" or why it will not be done.

        The answer is written once, by the first to know it, so all do the same.
        """
        key, end, answer = f"{what}/{self._round}", time.monotonic() + _READY, ""
        self.channel.tell(functools.partial(declare, at=key, size=self.size, refused=why_not))
        while not answer and self.channel.open:
            late = time.monotonic() > end
            answer = self.channel.ask(functools.partial(decision, at=key, late=late), 2.0) or ""
            time.sleep(0 if answer else 0.005)
        return "" if answer == "go" else answer or "the other ranks could not be reached"

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """While all ranks run a forward again none is stuck; what time that takes does not count as waiting."""
        self.replaying_until = time.monotonic() + _REPLAY
        try:
            yield
        finally:
            self.since, self.replaying_until = time.monotonic(), 0.0

    def leave(self) -> None:
        """Before this rank stops: wait until all have what they need for their reports, or too long."""
        if not self.leaving.acquire(blocking=False):
            time.sleep(2 * GIVE_UP)  # the deadline has come, and ends this process
        try:
            self.channel.post({"kind": "raised", "rank": self.rank, "round": self._round})
            self.wait_for_others()
        finally:
            self._round += 1
            self.asked, self.raised, self.since, self.since_raised = None, False, 0.0, 0.0
            self._deadline = None
            self.leaving.release()

    def wait_for_others(self) -> None:
        """Say that this rank is ready to leave, and wait for the others as long as that may take."""
        key, end = f"ready/{self._round}", (self.since or time.monotonic()) + GIVE_UP
        self.channel.tell(lambda store: store.add(key, 1))
        while time.monotonic() < end and self.channel.open:
            if self.channel.ask(functools.partial(self._all_ready, at=key), 1.0):
                return
            time.sleep(0.05)

    def _all_ready(self, store: Any, at: str) -> bool:
        self.channel.neighbours.look(store)
        return bool(store.add(at, 0) >= ranks_here(store) - self.channel.neighbours.stopped())

    # A batch that is to be dropped.

    def agree(self, recorder: DebugUnderflowOverflow, bad: bool) -> bool | None:
        """Whether all ranks drop this batch: they do if it is bad on one. None where ranks are missing.

        The first to write the answer decides for all, so nobody is ever of another opinion.
        """
        number = self._agreed[id(recorder)] = self._agreed.get(id(recorder), -1) + 1
        if self._alone or not self.channel.open or not self._all_here():
            self._alone = True
            return None
        at = f"batch/{self.users.index(recorder)}/{number}"
        answer = self.channel.ask(lambda store: vote(store, at, bad), 5.0)
        end = time.monotonic() + _WAIT
        pause = 0.0005
        while not answer and self.channel.open:
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            late = time.monotonic() > end
            answer = self.channel.ask(functools.partial(self._answer, at=at, late=late), 5.0)
        if answer in ("drop", "keep"):
            return bool(answer == "drop")
        self._alone = True
        return None

    def abstain(self) -> None:
        """Say, once, that no recorder of this rank drops batches: nobody need wait for its word."""
        if not self._abstains:
            self._abstains = True
            self.channel.tell(lambda store: store.add("abstain", 1))

    def _all_here(self) -> bool:
        """Whether every rank takes part: decided once, by the first to know."""
        if self._agreed and max(self._agreed.values()) > 0:
            return True
        end = time.monotonic() + _FIRST_WAIT
        while self.channel.open:
            late = time.monotonic() > end
            answer = self.channel.ask(functools.partial(together_or_alone, size=self.size, late=late), 5.0)
            if answer:
                return bool(answer == "together")
            time.sleep(0.02)
        return False

    # In the channel's thread.

    def _answer(self, store: Any, at: str, late: bool) -> str:
        self.channel.neighbours.look(store)
        return answer_to(store, at, late)

    def _heard(self, entry: Entry) -> None:
        if entry["kind"] == "raised" and entry["round"] >= self._round and entry["rank"] != self.rank:
            self.raised = True
            self.since_raised = self.since_raised or time.monotonic()
        if entry["kind"] != "event" or len(self._peers) >= _PEERS:
            return
        given = {key: entry[key] for key in ("rank", "host", "time", "step", "waits", "stop", "wish", "round")}
        peer = Peer(**given, order=len(self._peers), event=_event(entry["event"]))
        for i, known in enumerate(self._peers):
            if (known.rank, known.step, known.round, known.event.batch) == (
                peer.rank, peer.step, peer.round, peer.event.batch,
            ):  # fmt: skip
                self._peers[i] = replace(known, event=peer.event)  # more is known of it
                return
        self._peers.append(peer)
        if peer.stop and peer.rank != self.rank and peer.round >= self._round and self.asked is None:
            self.since = self.since or time.monotonic()
            self.asked = peer
            self._watch()

    def _look(self, store: Any) -> None:
        """A rank at the end of `with model.join()` answers collectives until all are through, and votes no more."""
        if not self._joined and in_join(self.thread):
            self._joined = True
            store.add("joined", 1)

    def _watch(self) -> None:
        if self._deadline is None and any(user.ranks.stop for user in self.users):
            self._deadline = Deadline(self, self._round)
            self._deadline.start()

    def is_over(self, turn: int) -> bool:
        """Whether this stop is behind us, or nobody is left to stop."""
        return self._round > turn or not self.users or not self.channel.same_process


_current: Together | None = None
_group: Any = None
_serial = 0
_lock = threading.Lock()


def of_job(recorder: DebugUnderflowOverflow) -> Together | None:
    """The side channel of the job, begun when it is first asked for; None outside a distributed job."""
    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        if _current is not None:
            close()  # the job's groups are gone, and its store may be
        return None
    group = dist.group.WORLD
    if _group is not group:
        _begin(group)
    if _current is not None and recorder not in _current.users:
        _current.users.append(recorder)
    return _current


def leave(recorder: DebugUnderflowOverflow) -> None:
    """A recorder is taken off; the last one ends the channel."""
    if _current is not None and recorder in _current.users:
        _current.users.remove(recorder)
        if not _current.users:
            close()


def close() -> None:
    """End the channel; nothing of it is left in this process."""
    global _current, _group
    with _lock:
        ended, _current, _group = _current, None, None
    if ended is not None:
        ended.channel.close()


def _begin(group: Any) -> None:
    global _current, _group, _serial
    close()
    dist: Any = torch.distributed
    with _lock:
        _group = group
        if dist.get_world_size() < 2:
            return
        store = None
        with contextlib.suppress(Exception):  # a backend without a store: MPI
            store = dist.distributed_c10d._get_default_store()
        if store is not None:
            _serial += 1
            _current = Together(store, dist.get_rank(), dist.get_world_size(), _serial)


def rank_now() -> int:
    """The rank of this process: that of its default group, else what its launcher has said."""
    dist: Any = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return world().rank


def _name(serial: int) -> str:
    """Of the channel: another one after a restart by torchrun, and for the next recorder in the same job."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{serial}"


def _order(peer: Peer) -> tuple[int, int, int]:
    return peer.event.step, _PHASES.index(peer.event.phase), peer.order


def _event(given: dict[str, Any]) -> Event:
    """An event from what to_dict() made of it."""
    made = given.pop("operation")
    if made is not None:
        for key in ("operands", "results"):
            made[key] = tuple(_operand(one) for one in made[key])
        made["facts"] = tuple(made["facts"])
        made = Operation(**made)
    return Event(**given, operation=made)


def _operand(given: dict[str, Any]) -> Operand:
    shape = given["shape"]
    return Operand(**{**given, "shape": None if shape is None else tuple(shape)})


def named(peers: Iterable[Peer]) -> list[dict[str, Any]]:
    """The events of all ranks in short, the first one first."""
    return [
        {"rank": p.rank, "host": p.host, "time": p.time, "step": p.event.step, "phase": p.event.phase,
         "module": p.event.module, "kind": p.event.kind, "op": p.event.op}
        for p in sorted(peers, key=_order)
    ]  # fmt: skip
